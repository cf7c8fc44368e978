"""The student's path in a real browser: from the index to a lesson, run, slide, solve, progress.

JupyterLab runs as `make lab` starts it, on a student's fresh copy and in a home folder of its own;
Playwright drives Chromium. Without one of them the tests are skipped; `make test-browser` installs
both and sets DP_COURSE_BROWSER, with which nothing is skipped. A screenshot of every stop lies in
out/browser/.
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from toys import free_port

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT/"out/browser"

FOUND = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
CHROMIUM = next(filter(None, FOUND), None)
MISSING = [name for name, found in (("Playwright", importlib.util.find_spec("playwright")),
                                    ("Chromium", CHROMIUM)) if not found]
if MISSING and "DP_COURSE_BROWSER" not in os.environ:
    pytest.skip(f"no {' and no '.join(MISSING)} here: make test-browser installs both",
                allow_module_level=True)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]
MINUTES = 60_000  # Playwright counts milliseconds


# --- JupyterLab, as `make lab` starts it


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def lab_command(port):
    root = ["--allow-root"] if os.getuid() == 0 else []
    return [sys.executable, "-m", "jupyter", "lab", *root, "--ServerApp.root_dir=.",
            "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
            "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True",
            f"--LabApp.app_settings_dir={ROOT}/tools/lab"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    "A folder with a student's copy: (its address in JupyterLab, the copy)."
    folder = tmp_path_factory.mktemp("lab")
    (folder/"runs").symlink_to(ROOT/"runs")
    shutil.copytree(ROOT/"docs", folder/"docs")  # the server follows no link
    port = free_port()
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "MPLBACKEND"))}
    bins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own |= {"HOME": str(folder), "PYTHONPATH": str(ROOT), "PATH": bins}
    subprocess.run([sys.executable, ROOT/"tools/student.py", folder/"student"], env=own, check=True)
    with open(folder/"lab.log", "w") as log:
        lab = subprocess.Popen(lab_command(port), cwd=folder, env=own, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/lab"
    try:
        until = time.monotonic() + 90
        while not answers(url):
            assert lab.poll() is None and time.monotonic() < until, (folder/"lab.log").read_text()
            time.sleep(.5)
        yield url, folder/"student"
    finally:
        lab.terminate()
        try:
            lab.wait(30)
        except subprocess.TimeoutExpired:
            lab.kill()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


# --- what a student does

PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
NOTEBOOK = "window.jupyterapp.shell.currentWidget.content"
# A kernel is idle for a moment between two cells, so that every cell is asked.
ALL_RAN = f"""() => {{
    const cells = {NOTEBOOK}.widgets.filter(cell => cell.model.type == 'code').map(c => c.model);
    const raised = cell => cell.outputs.toJSON().some(output => output.output_type == 'error');
    return cells.some(raised) || cells.every(cell =>
        cell.executionCount && cell.executionState != 'running');
}}"""


class Desk:
    "One page of JupyterLab, and the hands and eyes of a student."
    def __init__(self, page, home, name):
        self.page, self.name, self.stops = page, name, 0
        self.url, self.folder = home
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def shot(self, stop):
        self.stops += 1
        self.page.screenshot(path=SHOTS/f"{self.name}-{self.stops}-{stop}.png")

    def open(self, name):
        self.page.goto(f"{self.url}/tree/student/{name}?reset")  # without the last test's tabs
        self.page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=2*MINUTES)
        self.ready(name)
        self.page.wait_for_timeout(1000)
        asked = self.page.locator(".Toastify__toast, .jp-Dialog")  # of news, of a kernel
        assert not asked.count(), asked.first.inner_text()

    def ready(self, name):
        "Wait until this notebook is the one shown, its kernel started and idle."
        in_front = "n => window.jupyterapp?.shell.currentWidget?.context?.path == 'student/' + n"
        self.page.wait_for_function(in_front, arg=name, timeout=2*MINUTES)
        self.page.wait_for_selector(f"{PANEL} .jp-Cell:visible", timeout=2*MINUTES)
        self.idle(2)
        self.page.wait_for_selector(f"{PANEL} .jp-MarkdownOutput h1", timeout=MINUTES)

    def idle(self, minutes=1):
        mark = f"{PANEL} .jp-Notebook-ExecutionIndicator[data-status='idle']"
        self.page.wait_for_selector(mark, timeout=minutes*MINUTES)

    def follow(self, text):
        "Click on a link of the notebook that is open."
        self.page.locator(f"{PANEL} a", has_text=text).first.click()

    def sees_pictures(self):
        "Every picture of the prose that is open has been found."
        drawn = self.page.locator(f"{PANEL} .jp-MarkdownOutput img")
        drawn.first.wait_for(timeout=MINUTES)
        self.page.wait_for_function(f"[...document.querySelectorAll('{PANEL} .jp-MarkdownOutput "
                                    "img')].every(p => p.complete && p.naturalWidth)",
                                    timeout=MINUTES)

    def menu(self, *names):
        for i, name in enumerate(names):
            kind = ".lm-MenuBar-itemLabel" if i == 0 else ".lm-Menu-itemLabel"
            label = self.page.locator(kind, has_text=re.compile(f"^{name}$"))
            label.first.click()

    def go(self, words):
        "Make the code cell that holds these words the active one, in sight."
        i = self.page.evaluate(f"""async words => {{
            const notebook = {NOTEBOOK};
            const i = notebook.widgets.findIndex(cell =>
                cell.model.type == 'code' && cell.model.sharedModel.source.includes(words));
            if (i >= 0) {{
                notebook.activeCellIndex = i;
                await notebook.scrollToItem(i, 'start');
            }}
            return i;
        }}""", words)
        assert i >= 0, f"no cell with {words!r}"
        self.page.wait_for_timeout(500)
        return self.active()

    def write(self, cell, code):
        "Replace the code of a cell, and run it; what it says."
        cell.locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("ControlOrMeta+Enter")
        return self.answer(cell)

    def write_below(self, code):
        "The same in a new cell, below the active one."
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        return self.write(self.active(), code)

    def active(self):
        return self.page.locator(f"{PANEL} .jp-Cell.jp-mod-active")

    def answer(self, cell):
        "What a cell says once it has run."
        self.page.wait_for_timeout(300)
        self.idle(3)
        cell.locator(".jp-OutputArea-output").first.wait_for(timeout=MINUTES)
        return cell.locator(".jp-OutputArea").first.inner_text()

    def try_answer(self, check, code, stop):
        "Write an answer into the cell of an exercise; what the card says."
        name = re.match(r"def (\w+)", code)[1]
        said = self.write(self.go(f"\n{check}({name})"), f"{code}\n\n{check}({name})")
        self.shot(stop)
        return said

    def run_all(self, minutes):
        "Run every cell, as the menu does; the notebook as it was saved, and the seconds."
        begun = time.monotonic()
        self.menu("Run", "Run All Cells")
        self.page.wait_for_selector(f"{PANEL} .jp-Notebook-ExecutionIndicator"
                                    "[data-status='busy']", timeout=MINUTES)
        self.page.wait_for_function(ALL_RAN, timeout=minutes*MINUTES)
        self.idle(minutes)
        print(f"{self.name}: all cells in {time.monotonic() - begun:.0f} s")
        return self.saved()

    def restart(self):
        "Start the kernel again, as the menu does: every variable is gone."
        self.menu("Kernel", "Restart Kernel and Clear Outputs of All Cells…")
        self.page.locator(".jp-Dialog button", has_text="Restart").click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.page.wait_for_function(f"!({ALL_RAN})()", timeout=MINUTES)
        self.idle()

    def bar(self):
        "What JupyterLab's bar says when it is full: how many cells have run, in how many seconds."
        self.page.locator(f"{PANEL} .jp-Notebook-ExecutionIndicator").hover()
        said = self.page.locator(f"{PANEL} .jp-Notebook-ExecutionIndicator-tooltip").inner_text()
        found = re.search(r"Executed (\d+) cells\s*Elapsed time: (\d+)", said)
        assert found, f"the bar is not finished: {said}"
        return [int(n) for n in found.groups()]

    def saved(self):
        "Save, and read what is on the disk."
        self.page.keyboard.press("ControlOrMeta+s")
        self.page.wait_for_function(
            "!window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=MINUTES)
        name = self.page.evaluate("window.jupyterapp.shell.currentWidget.context.path")
        return nbformat.read(self.folder.parent/name, 4)

    def sees(self, words, stop):
        "The picture of the cell that holds these words is drawn: an image with pixels, or an SVG."
        self.go(words)
        drawn = self.active().locator(".jp-OutputArea img, .jp-OutputArea svg").first
        drawn.scroll_into_view_if_needed()
        assert drawn.evaluate("p => p.tagName == 'svg' || p.complete && p.naturalWidth > 100")
        assert drawn.bounding_box()["height"] > 50
        self.shot(stop)


@pytest.fixture
def desk(browser, home, request):
    page = browser.new_page(viewport={"width": 1400, "height": 950})
    page.set_default_timeout(MINUTES/2)
    desk = Desk(page, home, request.node.name.removeprefix("test_"))
    yield desk
    desk.shot("end")  # also after a failure
    page.close()


def outputs(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield from cell.outputs


def went_well(notebook):
    "Every code cell has run, and none raised."
    bad = [out.evalue for out in outputs(notebook) if out.output_type == "error"]
    assert not bad, bad
    code = [c for c in notebook.cells if c.cell_type == "code"]
    left = [c.source for c in code if not c.execution_count]
    assert not left, f"never run: {left}"


def figures(notebook):
    return sum("image/png" in out.get("data", {}) for out in outputs(notebook))


def ran(desk, lesson):
    "Run all cells: no error, as many figures as the authors' notebook has, and the bar is full."
    ours = nbformat.read(ROOT/f"nbs/{lesson}.ipynb", 4)
    ours.cells = [cell for cell in ours.cells if "solution" not in cell.metadata.get("tags", [])]
    notebook = desk.run_all(8)
    went_well(notebook)
    assert figures(notebook) >= figures(ours) > 0
    assert desk.bar()[0] == sum(c.cell_type == "code" for c in notebook.cells)
    desk.shot("ran")
    desk.page.mouse.move(700, 500)  # the bar's words would cover the page


def wrongly_and_rightly(desk, check, wrong, diagnosis, right):
    said = desk.try_answer(check, wrong, "wrong")
    assert "✗" in said and diagnosis in said and "Hint 1 of 3" in said, said
    said = desk.try_answer(check, right, "right")
    assert "✗" not in said and "□" not in said and "■" in said, said


def shows_progress(desk, lesson, exercises):
    said = desk.write_below("from dp_course.exercises import how_far\nhow_far()")
    desk.shot("progress")
    assert re.search(rf"{lesson}\s+□*■□*\s+1 of {exercises}", said), said
    assert not desk.errors, desk.errors


# --- three lessons


def test_second_lesson(desk):
    desk.open("index.ipynb")
    desk.sees_pictures()
    desk.shot("index")
    desk.follow("01 The promise")
    desk.ready("01_promise.ipynb")
    desk.shot("lesson")

    ran(desk, "01_promise")
    desk.sees("Diagram(", "diagram")
    desk.sees("allowed(fpr, eps), 1", "figure")
    wrong = "def sum_moves(low, high):\n    return high - low, high - low"
    right = "def sum_moves(low, high):\n    return max(abs(low), abs(high)), high - low"
    wrongly_and_rightly(desk, "check_sum_moves", wrong, "her whole value", right)
    shows_progress(desk, "01_promise", 4)


def test_a_copy_before_anything_has_run(desk):
    "Saved diagrams are drawn, guesses are folded, and closing an untouched notebook asks nothing."
    desk.open("01_promise.ipynb")
    desk.sees("Diagram(", "untouched")
    desk.page.wait_for_timeout(3000)
    assert not desk.page.evaluate("window.jupyterapp.shell.currentWidget.context.model.dirty")
    folded = desk.page.locator(f"{PANEL} details")
    assert folded.count() and not folded.evaluate_all("all => all.some(one => one.open)")
    desk.page.locator(".lm-TabBar-tab.lm-mod-current .lm-TabBar-tabCloseIcon:visible").click()
    desk.page.locator(PANEL).wait_for(state="detached")
    assert not desk.page.locator(".jp-Dialog").count()


def test_a_build_wrong_and_right(desk):
    desk.open("01_promise.ipynb")
    desk.run_all(8)
    stub = "def coin_answers(bits, eps, generator):\n    "
    for code, verdict, chosen in (
            ("return bits", "nobody ever lies", "the course's `coin_answers`"),
            ("lie = torch.rand(bits.shape, generator=generator) < 1/(1 + math.exp(eps))\n"
             "return torch.where(lie, 1 - bits, bits)", "5 of 5", "your `coin_answers`")):
        cell = desk.go("def coin_answers")
        cell.locator(".cm-content").click()
        desk.page.keyboard.press("ControlOrMeta+a")
        desk.page.keyboard.insert_text(stub + code.replace("\n", "\n    "))
        desk.page.keyboard.press("ControlOrMeta+Enter")
        for words, said in (("check_coin_answers(coin_answers)", verdict),
                            ("coin_answers = mine(coin_answers)", chosen)):
            cell = desk.go(words)
            cell.locator(".cm-content").click()
            desk.page.keyboard.press("ControlOrMeta+Enter")
            assert said in desk.answer(cell)
        desk.shot("build")
    desk.restart()
    desk.run_all(8)
    assert "your `coin_answers`" in desk.answer(desk.go("coin_answers = mine(coin_answers)"))


def test_slider(desk):
    desk.open("02_gaussian.ipynb")
    ran(desk, "02_gaussian")
    cell = desk.go("interact(draw")
    picture = cell.locator(".jp-OutputArea img").first
    before = picture.get_attribute("src")
    cell.locator(".noUi-handle").last.focus()
    for _ in range(8):
        desk.page.keyboard.press("ArrowRight")
    desk.page.wait_for_timeout(1000)
    desk.idle()
    moved = picture.get_attribute("src") != before
    assert moved, "the slider moved, the picture did not"
    desk.shot("slider")
