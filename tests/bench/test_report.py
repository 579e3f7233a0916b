"""The page of `bench report`: its content, no script and no request, light, dark and narrow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_worker_bench.report import RunFile, charts, commit_time, group_runs, key_tiles, render, sections
from llm_worker_bench.report.html import html
from llm_worker_bench.report.sections import Axis, by_category, by_length, family, make_table
from llm_worker_bench.results import Result, Run
from tests.helpers.bench_runs import dated, micro, on_another_machine, run_of, times
from tests.helpers.browser import Page, chromium

pytest.importorskip("matplotlib", reason="matplotlib (the extra `bench`) is not installed")

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
MODEL = {"name": "tiny.gguf", "sha256": "ab" * 32, "bytes": 1000}


def timed(name: str, value: float, unit: str = "s", **fields: Any) -> Result:
    return Result.from_samples(name, unit, times(value, 12, len(name)), "lower" if unit == "s" else "higher", **fields)


def every_kind() -> dict[str, Run]:
    """A small run of each kind, shaped as its command writes it."""
    rates = [
        timed(f"{what}{n}{depth}", 1e4 / n, "tok/s", percent_of_limit=40.0, bound_by="memory")
        for what in ("pp", "tg") for n in (128, 512) for depth in ("", "@d2048")
    ]  # fmt: skip
    latencies = [
        Result(f"{name}/{which}", "s", value, 0.9 * value, 1.1 * value)
        for name in ("ttft", "e2e") for which, value in (("mean", 0.2), ("p99", 0.5))
    ]  # fmt: skip
    one = {"name": "rope", "unit": "s", "before": 1.0, "after": 2.0, "change": 1.0, "low": 0.9, "high": None}
    taken = micro()
    taken = replace(
        taken,
        settings={"backends": ["reference", "cpu"]},
        details={**taken.details, "ab": [{**one, "verdict": "regressed"}, {"name": "x", "change": "y"}, 3]},
    )
    parts = [("qkv", 0.6, "critical"), ("norm", 0.07, "moderate"), ("rope", 0.01, "minor")]
    return {
        "micro": taken,
        "e2e": run_of("e2e", [*rates, Result.exact("peak_memory", "B", 2e8)], MODEL),
        "load": run_of("load", [timed(f"open/{how}", 0.1) for how in ("cold", "warm")] + [timed("import", 0.3)], MODEL),
        "serving": run_of(
            "serving",
            [*latencies, Result.exact("errors", "requests", 0.0), timed("request_throughput", 5.0, "req/s")],
            latencies={"ttft": times(0.2, 50, 1), "itl": []},
        ),
        "peers": run_of(
            "peers",
            [timed(f"tg128/{p}", 8.0, "tok/s", peer=p, version="1") for p in ("llm-worker-rbee", "llama-bench")],
            MODEL,
        ),
        "accuracy": run_of("accuracy", [Result.exact("kl", "", 1e-4), Result.exact("top1", "", 1.0, "higher")], MODEL),
        "profile": run_of("profile", [timed(f"prefill/{n}", s, share=s, **{"class": c}) for n, s, c in parts], MODEL),
        "experiments": run_of(
            "experiments",
            [timed(f"claim1/{side}/{n}", n / 100) for side in ("modules", "fused") for n in (1, 8)],
            verdicts=[{"claim": "1", "verdict": "refuted", "line": "claim 1: refuted - no gain"}],
            tables={"1": [["tokens", "modules"], ["8", "1.5 ms"]], "2": "x", "3": [[1], [2, 3]], "4": [[]]},
            claims={"1": {"claim": "modules are slow", "rule": "confirmed if the gain is clear"}},
        ),
        "mystery": run_of("mystery", [timed("a thing", 1.0, "widgets")]),
    }  # fmt: skip


def page_of(*runs: Run, title: str | None = None) -> str:
    given = [RunFile(f"run{i}.json", run) for i, run in enumerate(runs)]
    return render(given, title, lambda what, done, total: None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    evil = run_of(
        EVIL,
        [timed(f"{EVIL}/{n}", float(n), EVIL, backend=EVIL, bound_by=EVIL, percent_of_limit=5.0) for n in (1, 2, 4)]
        + [Result.exact('$x_1$ & "quotes" \x00\x1b', "", 0.0)],
        {"name": EVIL},
        verdicts=[{"verdict": EVIL, "line": EVIL}],
    )
    texts = {
        "every": page_of(*every_kind().values()),
        "history": page_of(*(micro(seed=i, factor=1 - i / 10, commit=f"{i}" * 40, day=i) for i in range(1, 5))),
        "evil": page_of(evil, replace(evil, kind="experiments"), title=EVIL),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("name", ["every", "history", "evil"])
def test_page_opens_without_errors_or_requests(browser: Any, pages: dict[str, Path], name: str) -> None:
    with Page(browser, pages[name]) as shown:
        assert shown.requests == [pages[name].as_uri()]
        assert shown.console_messages == []
        assert shown.page.locator("script, iframe, img, link[rel=stylesheet]").count() == 0


def test_page_tables_hold_the_result_names(browser: Any, pages: dict[str, Path]) -> None:
    with Page(browser, pages["every"]) as shown:
        heads = set(shown.page.locator("tbody th").all_text_contents())
        assert {result.name for result in every_kind()["micro"].results} <= heads
        assert {"pp512", "tg128@d2048", "kl", "qkv", "a thing", "open", "first token", "tg128 · llama-bench"} <= heads
        assert "claim 1: refuted - no gain" in shown.page.inner_text(".verdicts")
        text = shown.page.inner_text("main")
        assert "Claim 1: modules are slow" in text
        assert "confirmed if the gain is clear" in text
        assert "reference and cpu, in turn" in text
        assert shown.page.locator("nav a").count() == len(every_kind()) + 1
        for link in shown.page.locator("nav a").all():
            assert shown.page.locator(str(link.get_attribute("href"))).count() == 1


@pytest.mark.parametrize("dark", [False, True])
def test_page_charts_are_visible(browser: Any, pages: dict[str, Path], dark: bool) -> None:
    with Page(browser, pages["every"], dark=dark) as shown:
        boxes = shown.page.evaluate(
            "[...document.querySelectorAll('figure svg')].map(s => { const b = s.getBoundingClientRect();"
            " return [b.width, b.height, s.querySelectorAll('path, use').length] })"
        )
        assert len(boxes) > 10
        assert all(width > 200 and height > 40 and drawn > 5 for width, height, drawn in boxes)
        # every colour is one of the page's variables and has a value in this scheme
        used = set(
            re.findall(r"var\(--(\w+)\)", "".join(s.inner_html() for s in shown.page.locator("figure svg").all()))
        )
        assert {"ink", "grid", "s0"} <= used
        styles = "getComputedStyle(document.documentElement).getPropertyValue"
        assert all(shown.page.evaluate(f"{styles}('--{name}')") for name in used)


def brightness(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("dark", [False, True])
def test_page_colours_follow_light_and_dark(browser: Any, pages: dict[str, Path], dark: bool) -> None:
    with Page(browser, pages["every"], dark=dark) as shown:
        ground = shown.page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
        text = shown.page.evaluate("getComputedStyle(document.querySelector('td')).color")
        label = shown.page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        assert (brightness(ground) < 100) == dark
        for colour in (text, label):
            assert abs(brightness(colour) - brightness(ground)) > 90


@pytest.mark.parametrize(("name", "width"), [("every", 380), ("history", 380), ("evil", 380), ("every", 1200)])
def test_page_has_no_overflow(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    with Page(browser, pages[name], width=width) as shown:
        for details in shown.page.locator("details").all():
            details.evaluate("element => element.open = true")
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
        outside = shown.page.evaluate(
            "width => [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .drawing'))"
            ".filter(e => e.getBoundingClientRect().right > width + 1).map(e => e.outerHTML.slice(0, 80))",
            width,
        )
        assert outside == []


def test_page_script_in_a_name_is_text(browser: Any, pages: dict[str, Path]) -> None:
    with Page(browser, pages["evil"]) as shown:
        assert shown.page.title() == EVIL
        assert shown.page.inner_text("h1") == EVIL
        assert f"{EVIL}/1" in shown.page.locator("tbody th").all_text_contents()
        assert shown.page.locator("main script, main img").count() == 0


def test_history_section_shows_each_commit(browser: Any, pages: dict[str, Path]) -> None:
    with Page(browser, pages["history"]) as shown:
        text = shown.page.inner_text("main")
        assert "History" in text
        assert "run0.json compared with run3.json: 0 regressed, 15 improved, 0 within noise" in text
        labels = shown.page.locator("figure svg text").all_text_contents()
        assert {f"{i}" * 7 for i in range(1, 5)} <= {label.strip() for label in labels}


def test_page_prints_in_light_colours(browser: Any, pages: dict[str, Path]) -> None:
    with Page(browser, pages["every"], dark=True) as shown:
        shown.page.emulate_media(media="print", color_scheme="dark")
        assert (
            brightness(shown.page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")) > 200
        )
        assert brightness(shown.page.evaluate("getComputedStyle(document.querySelector('td')).color")) < 60


@pytest.mark.parametrize("kind", list(every_kind()))
def test_render_each_kind_makes_a_page(kind: str) -> None:
    text = page_of(every_kind()[kind])
    assert text.startswith("<!doctype html>")
    assert "https://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert text.count("<section") == 2


@pytest.mark.parametrize("kind", list(every_kind()))
def test_render_empty_or_invalid_run_makes_a_page(kind: str) -> None:
    odd = [
        Result(f"{name}/1", "s", value, value, value, samples=(value,) * count, fields=fields)
        for name, value, count, fields in (
            ("zero", 0.0, 20, {}),
            ("negative", -1.0, 20, {"percent_of_limit": -5.0}),
            ("none", math.nan, 20, {"percent_of_limit": "many", "share": None}),
            ("endless", math.inf, 3, {"bytes": 1, "operations": 1, "share": "x", "class": 7}),
            ("same", 1.0, 50, {"share": 0.5, "class": [1], "backend": "a"}),
            ("_hidden", 2.0, 0, {"bytes": 5, "operations": 3, "limit_s": 0, "backend": "b"}),
        )
    ]
    strange: list[dict[str, Any]] = [
        {},
        {"limits": 3, "verdicts": "x", "latencies": [1]},
        {
            "limits": {"operations_per_second": "fast", "bandwidth": [1]},
            "verdicts": [1, None],
            "latencies": {"ttft": "x"},
        },
        {"limits": {"operations_per_second": 0, "bandwidth": [{"bytes": 1, "bytes_per_second": 0}]}},
    ]
    for details in strange:
        page_of(
            run_of(kind, [], **details), replace(run_of(kind, odd, **details), machine={}, versions={}, commit=None)
        )
    broken = replace(run_of(kind, odd), complete=False, created="yesterday", commit={"date": 5, "id": None})
    assert "broken off" in page_of(broken)


def test_unmeasured_section_names_reasons() -> None:
    details = {
        "left_out": {"llama-bench": "no such file"},
        "failed": {"transformers": "it <died>"},
        "warning": "half cold",
    }
    text = page_of(run_of("peers", [timed("tg128/llm-worker-rbee", 8.0, "tok/s")], **details))
    for line in ("left out: llama-bench: no such file", "failed: transformers: it &lt;died&gt;", "half cold"):
        assert f'<p class="notice">{line}</p>' in text


def test_peer_table_shows_the_ratio_to_ours() -> None:
    rates = {"llm-worker-rbee": 4.0, "llama-bench": 8.0}
    run = run_of("peers", [Result.exact(f"tg128/{p}", "tok/s", r, "higher", peer=p) for p, r in rates.items()])
    assert [(tile.name, tile.value) for tile in key_tiles(run)] == [("tg128: ours / llama-bench", "0.50×")]
    assert '<td class="num">0.50×</td>' in page_of(run)


def test_key_tiles_load_begins_with_peak_memory() -> None:
    run = run_of("load", [Result.exact(f"memory/{when}", "B", size) for when, size in (("import", 4e7), ("peak", 2e8))])
    assert [(tile.name, tile.value) for tile in key_tiles(run)] == [("memory/peak", "200 MB")]


def test_log_ticks_narrow_axis_has_few_ticks() -> None:
    shown = charts.ChartRenderer()
    drawn = charts.draw_cumulative(shown, "first token", [(0.0285 + i / 2000, i / 8) for i in range(8)], "s")
    assert 2 <= len(re.findall(r">[\d.]+ ms<", drawn)) <= 6


def test_make_table_groups_rows_by_family() -> None:
    run = run_of("mystery", [timed(name, 1.0) for name in ("a/1", "b/1", "a/2", "b/2", "b/3", "c/1")])
    rows = re.findall(r"<tr( class=.first.)?><th scope=.row", make_table(run.results, ""))
    assert [i for i, start in enumerate(rows) if start] == [3, 5]


def test_chart_gallery_large_run_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MAX_CHARTS", 2)
    text = page_of(run_of("mystery", [timed(f"family{i % 7}/{i}", 1.0 + i) for i in range(700)]))
    assert text.count("<svg") == 4  # two of lengths, two of distributions
    assert "5 more plots are left out" in text  # 7 families by length
    assert "33 more plots are left out" in text  # 7 families of 100 in plots of 24 rows
    assert "family6/699" in text


def test_render_runs_of_two_machines_compares_with_warning() -> None:
    run = micro()
    text = page_of(run, on_another_machine(run, cpu="Other 9000"))
    assert "taken on different machines" in text
    assert "Micro-benchmarks compared" in text
    assert "Other 9000" in text


def test_group_runs_by_kind_model_machine_ordered_by_commit() -> None:
    e2e = every_kind()["e2e"]
    other = replace(e2e, model={**MODEL, "sha256": "cd" * 32, "name": "other.gguf"})
    given = [RunFile(f"{i}", run) for i, run in enumerate((dated(e2e, day=9), micro(), dated(e2e, day=2), other))]
    found = group_runs(given)
    assert [(s.title, [g.name for g in s.files]) for s in found] == [
        ("Micro-benchmarks", ["1"]), ("End to end: other.gguf", ["3"]), ("End to end: tiny.gguf", ["2", "0"])
    ]  # fmt: skip


def test_commit_time_prefers_the_commit_date() -> None:
    early = replace(micro(), commit={"date": "2026-01-01T02:00:00+02:00"}, created="2027-01-01T00:00:00+00:00")
    late = replace(micro(), commit=None, created="2026-01-01T00:00:01+00:00")
    assert commit_time(early) < commit_time(late) < commit_time(replace(micro(), commit=None, created="no date"))


def names(found: dict[Axis, dict[str, list[tuple[Any, Result]]]]) -> dict[str, dict[str, list[Any]]]:
    return {
        axis.title: {name: [x for x, _ in points] for name, points in lines.items()} for axis, lines in found.items()
    }


def test_result_names_give_families_lengths_and_categories() -> None:
    listed = "rope/8 rope/1 single/1 linear/Q4/1 linear/Q4/128 pp512 pp64 tg128@d64 tg128@d9@b2"
    results = [timed(name, 1.0) for name in listed.split()]
    assert names(by_length(results)) == {
        "rope": {"measured": [1, 8]},
        "linear": {"Q4": [1, 128]},
        "prefill over tokens": {"measured": [64, 512]},
    }
    assert names(by_length([timed(f"tg128@d{d}", 1.0) for d in (0, 64)])) == {
        "decode over depth": {"tokens 128": [0, 64]}
    }
    kinds = [timed(f"dequantize/{kind}", 1.0) for kind in ("F16", "Q4_0", "Q8_0", "IQ4")]
    assert names(by_category([*kinds, *results])) == {"dequantize": {"": ["F16", "Q4_0", "Q8_0", "IQ4"]}}
    assert [family(name) for name in ("a/b/c", "tg128@d64", "pp512/llama-bench", "plain")] == [
        "a", "decode", "prefill", "plain"
    ]  # fmt: skip


def test_html_escapes_text_and_replaces_control_characters() -> None:
    assert html("<b>&\"'\x00") == "&lt;b&gt;&amp;&quot;&#x27;\ufffd"
    assert html(html("<b>")) == "&lt;b&gt;"
