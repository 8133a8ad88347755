"""Every name of docs/compat.md: present ones can be read, refused ones name the reason, absent ones raise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from places import ROOT
from programs import environment_of_no_job

sys.path.insert(0, str(ROOT / "tools" / "docs"))
import deepspeed_surface as surface


def on_the_page() -> dict[tuple[str, str], tuple[str, str]]:
    """Return status and reason by module and name, as on the page."""
    found = {}
    for line in (ROOT / "docs" / surface.PAGE).read_text().splitlines():
        if line.startswith("| `deepspeed"):
            module, status, names = line.strip("| ").split(" | ")
            kind, _, reason = status.partition(": ")
            for name in names.replace("`", "").split():
                found[module.strip("`").removeprefix("deepspeed").removeprefix("."), name] = (kind, reason)
    return found


def test_each_name_of_the_page_does_what_the_page_says() -> None:
    page = on_the_page()
    assert set(page) == set(surface.listed()) and len(page) > 900
    for (module, name), (status, reason) in page.items():
        where = f"deepspeed.{module}.{name}"
        if status == "absent":
            with pytest.raises((AttributeError, ModuleNotFoundError)):
                surface.found(module, name)
            continue
        value = surface.found(module, name)
        if status == "refuses":
            with pytest.raises(NotImplementedError) as caught:
                value()
            assert reason and reason in str(caught.value), where
        else:
            assert status == "present" and getattr(value, "zcomm_reason", None) is None, where


def test_the_page_is_written_from_the_package() -> None:
    text = (ROOT / "docs" / surface.PAGE).read_text()
    assert surface.table() in text, "run python tools/docs/deepspeed_surface.py --write docs"


def test_importing_the_package_is_light() -> None:
    program = (
        "import sys, zcomm.compat.deepspeed as deepspeed, zcomm.compat.deepspeed.inference\n"
        "assert deepspeed.DeepSpeedTransformerLayer.__name__ == 'DeepSpeedTransformerLayer'\n"
        "assert deepspeed.__version_minor__ == 19\n"
        "print([name for name in ('torch', 'zcomm._core', 'zcomm.zero', 'zcomm.config') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment_of_no_job()
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_refused_class_can_be_named_and_derived_from_but_not_used() -> None:
    import zcomm.compat.deepspeed as deepspeed

    assert not isinstance(object(), deepspeed.DeepSpeedTransformerLayer)

    class Own(deepspeed.DeepSpeedTransformerLayer):  # type: ignore[misc]
        pass

    for use in (deepspeed.DeepSpeedTransformerLayer, Own, lambda: deepspeed.DeepSpeedTransformerLayer.from_layers):
        with pytest.raises(
            NotImplementedError, match=r"deepspeed\.DeepSpeedTransformerLayer is not available: zcomm has no kernels"
        ):
            use()
