"""The report in a real browser, at the widths of a desktop and a phone, where one is installed."""

import os
import re
import shutil
import subprocess
from datetime import datetime, timezone

import pytest

from tests.support.recorded import trained_run
from tfdist_cli.report.data import read_data
from tfdist_cli.report.page import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
const chart = document.querySelector(".plot");
const box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right, clientY: box.top + 5}));
const wide = [...document.querySelectorAll("main *")].filter((each) => !each.closest(".scroll")
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
document.title = JSON.stringify({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth, wide: wide.length,
  tip: document.querySelector(".tip").textContent, dark: matchMedia("(prefers-color-scheme: dark)").matches,
  background: getComputedStyle(document.body).backgroundColor,
});
</script>"""


@pytest.mark.slow
@pytest.mark.rotates(5, 4)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_shows_the_values_under_the_pointer(tmp_path, width, dark):
    run = read_data(trained_run(tmp_path / "runs" / "digits-1").path)
    html = page([run], datetime(2026, 1, 2, tzinfo=timezone.utc))
    # A window of a browser is at least 500 pixels wide: the phone is a frame in it.
    inner, outer = tmp_path / "page.html", tmp_path / "frame.html"
    inner.write_text(html.replace("</body>", f"{PROBE}</body>"))
    answer = (
        "<script>onload = () => {{ document.title = document.querySelector('iframe').contentDocument.title; }}</script>"
    )
    outer.write_text(
        f'<title></title><iframe src="page.html" width="{width}" height="900"></iframe>{answer}'.replace(
            "{{", "{"
        ).replace("}}", "}")
    )
    options = [
        "--headless",
        "--disable-gpu",
        "--no-sandbox",
        "--allow-file-access-from-files",
        "--virtual-time-budget=5000",
    ]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    argv = [
        str(BROWSER),
        *options,
        scheme,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,1000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*argv, outer.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    told = re.search(r"<title>(.*?)</title>", done.stdout)
    assert told, done.stderr[-2000:]
    assert '"overflow":0,"wide":0' in told[1], told[1]
    assert "step 60" in told[1]
    assert "train 0.1667" in told[1]
    assert f'"dark":{"true" if dark else "false"}' in told[1]
    assert ("rgb(14, 17, 23)" in told[1]) == dark
