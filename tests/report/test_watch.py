"""A live report is written beside a run."""

import os
import time

import pytest

from nanorchestra.report.run import Run
from nanorchestra.report.watch import Watch


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "one", '[run]\nname = "one"\n')


def test_the_report_is_written_beside_the_run_again_and_again(run):
    watch = Watch(run, every=0.01)
    run.append("metrics", {"phase": "grpo", "step": 1, "reward": 0.5, "seconds": 1.0})
    time.sleep(0.02)
    watch.report()
    writer = watch._writer
    time.sleep(0.02)
    watch.report()
    assert watch._writer is writer, "one at a time"
    assert os.getsid(writer.pid) != os.getsid(0)
    assert writer.wait() == 0 and "location.reload()" in (run.path / "report.html").read_text()
    watch.report()
    assert watch._writer is not writer
    watch.close()
    assert watch._writer.poll() is not None


def test_the_first_report_waits_for_no_time_to_pass(run):
    watch = Watch(run, every=1000.0)
    run.append("metrics", {"phase": "grpo", "step": 1, "reward": 0.5, "seconds": 1.0})
    watch.report()
    writer = watch._writer
    assert writer.args[:3] == ["nice", "-n", "0"], "it is there soon on a busy machine, too"
    assert writer.wait() == 0 and (run.path / "report.html").exists()
    watch.report()
    assert watch._writer is writer, "the second one does"
