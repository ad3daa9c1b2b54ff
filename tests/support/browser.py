"""A real browser without a screen: Debian's Chromium, driven by its own driver; nothing is downloaded."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_SECONDS = 60.0

_CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => {
  const part = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const colour = parse(getComputedStyle(one).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
let least = [21, ""];
for (const one of document.querySelectorAll("body *")) {
  const own = [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!own || !one.checkVisibility() || one.closest(".unseen, noscript, script, style")) continue;
  const [a, b] = [light(parse(getComputedStyle(one).color)), light(behind(one))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < least[0]) least = [ratio, one.outerHTML.slice(0, 200)];
}
return least;
"""


class Browser:
    """One window."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = _program("chromium")
        # root has no sandbox; a container has a small /dev/shm
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.add_argument("--hide-scrollbars")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))

    def show(self, *, width: int = 1100, height: int = 900, is_dark: bool = False) -> None:
        """Set the size of the window, in CSS pixels, and what the user prefers."""
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        wish = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._tell("Emulation.setEmulatedMedia", features=[wish])

    def open(self, address: str) -> None:
        """Go there in a new tab, which knows nothing of earlier ones."""
        old = self.driver.window_handles
        self.driver.switch_to.new_window("tab")
        for handle in old:
            self.driver.switch_to.window(handle)
            self.driver.close()
        self.driver.switch_to.window(self.driver.window_handles[0])
        self.show()
        self.errors()
        self.driver.get(address)

    def allow_clipboard(self) -> None:
        """Let pages write to the clipboard and read it, as a person's click does."""
        self._tell("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    def run(self, script: str, *arguments: object) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        """Visible text of the first element that fits; empty: there is none."""
        found = self.driver.find_elements("css selector", selector)
        return found[0].text if found else ""

    def click(self, selector: str) -> None:
        """Click the first element that fits."""
        self.driver.find_element("css selector", selector).click()

    def wait(self, done: Callable[[], object], what: str) -> None:
        """Until it is so.

        Raises:
            TimeoutException: it never was; the message has `what` and the page's text.
        """
        try:
            WebDriverWait(self.driver, PATIENCE_SECONDS, poll_frequency=0.1).until(lambda _: done())
        except Exception as error:
            error.add_note(f"waited for {what}\n{self.text()[:3000]}\n{self.errors()}")
            raise

    def errors(self) -> list[str]:
        """What the console has, since the last call."""
        entries = self.driver.execute("getLog", {"type": "browser"})["value"]
        return [str(entry["message"]) for entry in entries]

    def least_contrast(self) -> tuple[float, str]:
        """The worst contrast of a text to what is behind it, and the element."""
        ratio, element = self.run(_CONTRAST)
        return float(ratio), str(element)

    def is_too_wide(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(self.run("return document.documentElement.scrollWidth > innerWidth"))

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(self.driver.get_screenshot_as_png())

    def _tell(self, command: str, **parameters: object) -> None:
        self.driver.execute_cdp_cmd(command, parameters)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the test."""
    found = Browser()
    try:
        yield found
    finally:
        found.driver.quit()


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(
            f"{name} is not installed: make system-packages, or apt install chromium chromium-driver"
        )
    return path
