# SPDX-License-Identifier: Apache-2.0
"""The page of a dry run: its figures are the run's, it needs nothing but itself, and no name breaks out of it."""
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor.debug import dry_run
from ms_dtensor.debug.dryrun.page import Exchange, Facts, Parameter, folded, html, thinned
from ms_dtensor.debug.text import human
from ms_dtensor.errors import ConfigError
from tests.debug import dry_programs as programs

HOSTILE = '"><script>alert(1)</script><img src=x onerror=\'alert(2)\'>&amp;'


class Read(HTMLParser):
    """Tags, attributes and words of a page; every tag that is opened is closed by its own."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags, self.attributes, self.words = set(), [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data):
        self.words.append(data)


def alone(page: Read) -> None:
    """Nothing runs, nothing is loaded."""
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset", "action")]
    assert not [v for _, v in page.attributes if v and re.match(r"(https?:|//|data:|javascript:)", v) and "w3.org" not in v]


@pytest.mark.parametrize("where", ["title", "fact", "parameter", "layout", "cell", "axis", "op", "kind", "compared", "link"])
def test_no_name_breaks_out(where):
    """A page with a hostile name at one place has the tags of the page with a harmless one there."""
    def page(name: str) -> Read:
        def at(place: str, usual: str) -> str:
            return name if place == where else usual
        return Read(html(Facts(
            at("title", "t"), [(at("fact", "f"), at("fact", "f"))],
            [Parameter(at("parameter", "p"), (2, 3), at("layout", "l"), (2, 3), 24)],
            [Exchange(at("cell", "c.0"), at("op", "all_reduce"), (at("axis", "tp"),), "forward", 8)],
            [at("kind", "a"), "b"], [(0, (0, 0)), (1, (1, 2)), (4, (3, 1))], "", [(at("compared", "x"), "s", 1.0, 2.0)],
            [(at("link", "f.json"), at("link", "f"))])))
    bad, good = page(HOSTILE), page("harmless")
    alone(bad)
    assert bad.tags == good.tags and sorted(n for n, _ in bad.attributes) == sorted(n for n, _ in good.attributes)
    said = [*bad.words, *(v for _, v in bad.attributes if v)]
    assert any(HOSTILE in word for word in said)


def test_the_page_of_a_step(tmp_path):
    """What stands on it is what the run says; the pipeline's picture and the layers' bytes among it."""
    with dry_run(world=4, rank=1, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = md.replicate(programs.tensor_parallel(programs.Net(layers=3), mesh["tp"]), mesh=mesh["dp"])
        x, w = (md.distribute_tensor(t, mesh, [md.Shard(0), md.Replicate()]) for t in programs.batch())
        programs.gradients(net, x, w)
    sent = {}
    for e in run.communication:
        calls, size = sent.get(f"{e.op} {','.join(e.axes)}", (0, 0))
        sent[f"{e.op} {','.join(e.axes)}"] = calls + 1, size + e.bytes
    run.report(tmp_path / "step.html", hardware="a100", title="three layers",
               measured={"seconds": 0.5, "bytes": 2 * run.memory().peak, "comm": {k: [*v, 1.0] for k, v in sent.items()}},
               links=[("metrics.jsonl", "of the run")])
    page = Read((tmp_path / "step.html").read_text())
    alone(page)
    words = page.words
    assert {"svg", "table"} <= page.tags and "three layers" in words and ("href", "metrics.jsonl") in page.attributes
    up = words.index("layers.0-2.up.weight")
    assert words[up:up + 6] == ["layers.0-2.up.weight", "f32[32@tp, 16] on mesh(dp=2, tp=2)", "3", "[32, 16]", "[16, 16]",
                                "1.0 KiB"]
    assert human(run.memory().peak) in words and f"{len(run.communication):,} calls" in " ".join(words)
    for name, (calls, size) in sent.items():
        for said, value in ((f"{name}, calls", calls), (f"{name}, sent", size)):
            at = words.index(said)
            assert words[at + 1:at + 5].count(f"{value:,}") == 2 and ("1.000" if value else "n/a") in words[at + 1:at + 6]
    assert words.count("0.500") == 1, "of the bytes at the peak, which were said to be twice as many"
    names = [p.name for p in run.parameters()]
    assert len(names) == len(set(names)) == 3 * 4 + 1 and "layers.2.norm.weight" in names
    assert not run.pipeline()
    for wrong in (4, {"secs": 1.0}, {"seconds": float("nan")}, {"bytes": -1}, {"comm": {"all_reduce tp": 3}}):
        with pytest.raises(ConfigError, match="what a real run has shown"):
            run.report(tmp_path / "step.html", measured=wrong)


def test_the_pipelines_picture():
    with dry_run(world=2, device="CPU") as run:
        programs.pp(2)
    assert run.pipeline().startswith("<svg") and run.pipeline().count("rank ") == 2


def test_rows_and_points():
    rows = folded([("a.0.w", 1), ("a.1.w", 1), ("a.10.w", 1), ("a.2.w", 2), ("b", 1)])
    assert rows == [("a.0-10.w", 3, 1), ("a.2.w", 1, 2), ("b", 1, 1)]
    points = [(i, (i % 7, i // 100)) for i in range(1000)]
    few = thinned(points, 100)
    assert len(few) <= 101 and few[-1] == points[-1] and max(map(sum, (v for _, v in few))) == max(sum(v) for _, v in points)
    assert thinned(points[:50], 100) == points[:50]


def test_a_cell_that_is_called_outside_of_the_block_keeps_its_call():
    before = nn.Cell.__call__
    with dry_run(world=1, device="CPU"):
        assert nn.Cell.__call__ is not before
    assert nn.Cell.__call__ is before and nn.ReLU()(Tensor(np.ones(2, np.float32))).shape == (2,)
