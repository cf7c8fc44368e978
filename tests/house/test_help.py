"`help()` says what the comments say: parameters, shapes, errors, sources."
import json
import pydoc
import re
import sys
from pathlib import Path

import dp_course

sys.path.insert(0, str(Path(__file__).resolve().parents[2]/"tools"))
import export  # noqa: E402


def said(name):
    return re.sub(r".\x08", "", pydoc.render_doc(getattr(dp_course, name)))


def test_it_describes_parameters_results_errors_and_sources():
    trainer = said("Trainer")
    assert "256 secret bits" in trainer and "arXiv 1607.00133" in trainer
    assert "ValueError" in trainer and "float: for `accuracy`" in trainer
    assert "Poisson sampling rate: batch_size/n" in said("epsilon")


def test_every_text_belongs_to_something_that_is_offered():
    texts = json.loads((export.ROOT/"dp_course/_help.json").read_text())
    for room, found in texts.items():
        __import__(room)
        dp_course._document(room)
        for name, text in found.items():
            thing = sys.modules[room]
            for part in name.split("."):
                thing = vars(thing)[part]
            assert getattr(thing, "__func__", thing).__doc__ == text, (room, name)
