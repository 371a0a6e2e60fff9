"""Which tests are fast, and fixtures. Nothing here imports torch (small.py does): the process that
hands out the tests starts its workers at once.
"""

import fnmatch
import gc
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Faster for models this small, in the processes that tests start too: threads would wait for each
# other, as other workers have the cores.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

# Slow as well: cases that have a faster sibling among the fast ones, or that few edits can break.
SLOWER = """
test_docs.py::test_the_tables_of_speed*
test_faults.py::*no memory left*
test_faults.py::*step 3]
test_groups_by_hand.py::*cispo]
test_groups_by_hand.py::*dr_grpo]
test_groups_by_hand.py::*normalised*
test_groups_by_hand.py::test_every_gradient*[[][dg]*o]
test_outgrow_verl.py::test_a_chat_model*
test_outgrow_verl.py::test_a_completion_without*
test_outgrow_verl.py::test_a_run_of_ppo*
test_outgrow_verl.py::test_dropout_is_0*
test_outgrow_verl.py::test_every_setting*
test_outgrow_verl.py::test_it_says_what*
test_outgrow_verl.py::test_minibatches_count*
test_outgrow_verl.py::test_the_length_penalty*
test_outgrow_verl.py::test_verl*
test_pitfalls.py::test_16_in_a_run*[[]rloo]
test_pitfalls.py::test_31*[[]*flags[02-9]]
test_pretended_cuda.py::test_a_reward_model*
test_pretended_cuda.py::test_a_run_*
test_pretended_cuda.py::test_a_step_waits*
test_pretended_cuda.py::test_a_tensor_*
test_pretended_cuda.py::test_a_wait_for_every*
test_pretended_cuda.py::test_of_a_long_completion*
test_pretended_cuda.py::test_other_architectures*
test_pretended_cuda.py::test_training_a_reward_model*
test_recipes.py::test_the_figures_of_memory*
test_reference.py::test_a_merged_model_is*
test_reference.py::test_an_adapter_is_trained_saved*
test_resume.py::test_a_command_that_is_refused*
test_resume.py::test_a_disk_that_fills*
test_resume.py::test_a_second_ctrl_c*
test_resume.py::test_after_running_out*
test_resume.py::test_an_overwritten_run_takes*
test_resume.py::test_ctrl_c_in_the_last*
test_resume.py::test_every_field*
test_resume.py::test_half_an_update*
test_resume.py::test_resume_where_there_is_nothing*
test_resume.py::test_resume_without_a_checkpoint_starts*
test_reward_model.py::test_another_value*
test_reward_model.py::test_the_embedded_model_prefers*
test_runs.py::test_where_matplotlib*
test_scripts.py::test_at_step_0*llama*
test_scripts.py::test_dropout_left_on*
test_scripts.py::test_every_forward_pass*
test_scripts.py::test_gradient_checkpointing*
test_scripts.py::test_in_bfloat16*[[]rloo*
test_scripts.py::test_rows_without_advantage*all-*[mkl]*
test_scripts.py::test_rows_without_advantage*rloo*
test_scripts.py::test_rows_without_advantage*some-grpo-[kl]*
test_site.py::*
test_stopping.py::test_a_run_with_stop_strings*
test_tiny.py::test_chances*
test_tiny.py::test_no_temperature*
test_tiny.py::test_the_page_has*
test_tokens.py::test_of_long_completions*
test_tokens.py::test_the_file_keeps*
""".split("\n")[1:-1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -m fast` runs all that is not marked slow."""
    ids = {item.nodeid for item in items}
    for item in items:
        # What runs with each of the scripts runs with grpo.py alone among the fast tests.
        sibling = re.sub(r"\b(ppo|rloo)\b(?=[^\[]*\]$)", "grpo", item.nodeid)
        has_faster = sibling != item.nodeid and sibling in ids
        if has_faster or any(fnmatch.fnmatch(item.nodeid, f"tests/{x}") for x in SLOWER):
            item.add_marker("slow")
        if not item.get_closest_marker("slow"):
            item.add_marker("fast")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make hardly any garbage, and what they make stays: the collector doesn't look through
    it, neither now nor while the tests run. Then it looks every 20,000 new objects: at every
    700, as Python does, that took a tenth of the time of a small run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of a run takes three quarters of the time of a small one."""
    if not request.node.get_closest_marker("draws"):
        monkeypatch.setattr("plumbing.runs.draw", lambda folders, path: None)


@pytest.fixture(params=["gpt2", "llama"])
def small_model(request: pytest.FixtureRequest):
    """A GPT-2 (learned positions) and a Llama (rotary positions), in evaluation mode."""
    from small import SMALL_MODELS

    return SMALL_MODELS[request.param]().eval()


@pytest.fixture
def make_job(tmp_path: Path):
    """small.job_maker."""
    from small import job_maker

    return job_maker(tmp_path)


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()


def browser_missing() -> str | None:
    """What the tests in a browser lack on this machine."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium: pip install selenium"
    return None if CHROMIUM and DRIVER else "needs chromium and chromedriver"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A browser without a screen, which logs each of its requests."""
    if reason := browser_missing():
        assert os.environ.get("PLAINRLHF_BROWSER") != "1", reason
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.get("data:,")  # the page that it opens with asks for pages of its own
    yield driver
    driver.quit()
