"""What does a second look at each test image give? Released networks, tested again.

    python -m experiments.views FILE.release.pt ...    some five minutes for each ResNet-20

Each release is tested with the images as they are, and with the mean of the scores over all shifts
by up to one pixel and their mirror images: 18 views. Nothing is trained and no eps is spent. The
views were chosen on the 5,000 held-out training images of a run on its way (eps 1.4 to 1.7):
58.82 % without views, 59.64 % with the mirror image, 61.38 % with all 18; later 59.84 % without and
61.5 % with 18 or with 50, shifts by two pixels among them.
"""
import hashlib
import json
from pathlib import Path

from dp_course.basics import keep_memory
from dp_course.cli import open_release
from experiments.harness import new_record, parser_of

SHIFTS = 1


def tested(path):
    "Test one release without and with views."
    found = open_release(path)
    once = found.scores()
    often = found.scores(shifts=SHIFTS, mirror=True)
    return {
        "release": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tested_on": once["tested_on"],
        "test_accuracy": once["test_accuracy"],
        "views": often["views"],
        "accuracy_of_views": often["test_accuracy"],
    }


def main():
    parser = parser_of("views", __doc__)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    args = parser.parse_args()
    keep_memory()
    record = new_record(__doc__, shifts=SHIFTS, mirror=True) | {"rows": []}
    for path in args.files:
        row = tested(path)
        print(row["release"], f"{row['test_accuracy']:.2%} {row['accuracy_of_views']:.2%}")
        record["rows"].append(row)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
