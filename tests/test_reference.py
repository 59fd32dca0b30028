"""The generated pages are current, and every metric is explained."""

from __future__ import annotations

import re
from pathlib import Path

from exgrpo_cli.inspect.views import views_sql
from exgrpo_cli.recipe import known_keys
from exgrpo_cli.recipe.reference import settings_reference
from exgrpo_cli.training import metrics as training_metrics

ROOT = Path(__file__).parents[1]
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_the_settings_reference_is_current() -> None:
    written = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert written == settings_reference(), "stale: run make docs"


def test_the_views_are_current() -> None:
    written = ROOT / "src/exgrpo_cli/experience/sql/views.sql"
    assert written.read_text(encoding="utf-8") == views_sql(), "stale: run make docs"


def test_the_settings_reference_has_every_key() -> None:
    page = settings_reference()
    for key in known_keys():
        section, _, leaf = key.rpartition(".")
        part = page.partition(f"## [{section}]")[2].partition("\n## ")[0] if section else page
        assert f"| `{leaf}` |" in part, key


def test_every_metric_of_a_step_is_explained() -> None:
    queries = ROOT / "src/exgrpo_cli/experience/sql/metrics.sql"
    names = re.findall(r'AS "([^"]+)"', queries.read_text(encoding="utf-8"))
    source = Path(training_metrics.__file__).read_text(encoding="utf-8")
    source = source.partition("def step_metrics")[2]
    names += [f"train/{name}" for name in re.findall(r'^        "(\w+)": ', source, re.MULTILINE)]
    assert len(names) > 35
    for name in names:
        group, _, leaf = name.rpartition("_")
        explained = f"`{name}`" in METRICS or (f"`{group}_" in METRICS and f"…_{leaf}" in METRICS)
        assert explained, f"docs/metrics.md does not explain {name}"
