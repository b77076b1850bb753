# SPDX-License-Identifier: Apache-2.0
"""Rows of the benchmarks as tables that people know: nccl-tests', hccl_test's, MindFormers' and MindSpeed-LLM's columns.

Pure: a table is (head, rows) of what is shown. None is shown as "n/a": not measured, or nothing to divide by.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arithmetic import KNOWN, efficiency, flops_per_token
from .suites import label

Row = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[Any]]]

NCCL = ("size(B)", "count(elements)", "type", "redop", "root", "time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong",
        "in place: time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong")
HCCL = ("data_size(Bytes)", "aveg_time(us)", "alg_bandwidth(GB/s)", "check_result")
MINDFORMERS = ("Config", "Task", "Datasets", "SeqLength", "Performance (tokens/s/p)", "Phase")
MINDSPEED = ("设备 device", "模型 model", "迭代数 iterations", "样本吞吐 samples/s", "tokens 吞吐 (tokens/s/p)",
             "单步迭代时间 (s/step)", "浮点计算数 (TFLOPs/s)")
LLAMA = ("layout", "ranks", "batch", "seq", "type", "tokens/s/p", "s/step", "TFLOP/s/p 6N", "TFLOP/s/p", "MFU", "GiB",
         "first step s", "loss")


def as_text(x: Any) -> str:
    if x is None:
        return "n/a"
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def nccl(rows: Sequence[Row]) -> Table:
    """One kind of collective in one group, by size."""
    def way(row: Row, key: str) -> list[Any]:
        found = row.get(key, {})
        return [found.get("time"), found.get("algbw"), found.get("busbw"), found.get("wrong")]
    return NCCL, [(r["size"], r["count"], r["type"], r["redop"], r["root"], *way(r, "out"), *way(r, "in")) for r in rows]


def hccl(rows: Sequence[Row]) -> Table:
    """The same as hccl_test prints it: out of place if there is such a call, else in place."""
    out: list[Sequence[Any]] = []
    for row in rows:
        way = row.get("out") or row["in"]
        check = "NULL" if way["wrong"] is None else "failed" if way["wrong"] else "success"
        out.append((row["size"], way["time"], way["algbw"], check))
    return HCCL, out


def best(row: Row) -> Row:
    """A collective's figures: out of place, or in place where there is nothing else."""
    return row.get("out") or row["in"]


def measured(rows: Sequence[Row]) -> list[Row]:
    """Llama rows that have figures."""
    return [r for r in rows if r.get("tokens_s_p") is not None]


def mindformers(rows: Sequence[Row], hardware: str) -> Table:
    """Published rows first, then the fastest layout of each model and length here."""
    out: list[Sequence[Any]] = [
        (f"{k['model']} ({k['hardware']})", "text_generation", "published", k["seq"], k["tokens_s_p"], "pretrain")
        for k in KNOWN["mindformers"]["rows"]]
    return MINDFORMERS, out + [(f"{r['model']}, {way(r)} ({hardware})", "text_generation", "random tokens", r["seq"],
                                r["tokens_s_p"], "pretrain") for r in fastest(rows)]


def mindspeed(rows: Sequence[Row], hardware: str) -> Table:
    out: list[Sequence[Any]] = [
        (k["device"], k["model"], *(k.get(key) for key in ("iterations", "samples_s", "tokens_s_p", "step_s", "tflops")))
        for k in KNOWN["mindspeed"]["rows"]]
    return MINDSPEED, out + [(hardware, f"{r['model']}, {way(r)}", None, r["samples_s"], r["tokens_s_p"], r["step_s"],
                              r["tflops"]) for r in fastest(rows)]


def published(model: str, seq: int, peak: float | None) -> list[Row]:
    """MindFormers' figures of this model and length, with what follows from them."""
    out = []
    for k in KNOWN["mindformers"]["rows"]:
        if k["model"] == model and k["seq"] == seq:
            six = flops_per_token(k["parameters"]) * k["tokens_s_p"] / 1e12
            out.append({"tokens_s_p": k["tokens_s_p"], "hardware": k["hardware"], "tflops_6n": round(six, 1),
                        "mfu_6n": None if peak is None else round(six / peak, 4)})
    return out


def fastest(rows: Sequence[Row]) -> list[Row]:
    found: dict[tuple, Row] = {}
    for row in measured(rows):
        key = row["model"], row["seq"]
        if not row.get("scaling") and (key not in found or row["tokens_s_p"] > found[key]["tokens_s_p"]):
            found[key] = row
    return list(found.values())


def way(row: Row) -> str:
    return label(row["layout"], row["micro_batches"], row["recompute"])


def llama(rows: Sequence[Row]) -> Table:
    out: list[Sequence[Any]] = []
    for r in rows:
        if "refused" in r:
            out.append((way(r), r["ranks"], r["batch"], r["seq"], r["type"], r["refused"], *[""] * 7))
        else:
            out.append((way(r), r["ranks"], r["batch"], r["seq"], r["type"], r["tokens_s_p"], r["step_s"], r["tflops_6n"],
                        r["tflops"], r["mfu"], r["memory_gib"], r["first_step_s"],
                        " to ".join("n/a" if r[key] is None else str(r[key]) for key in ("first_loss", "last_loss"))))
    return LLAMA, out


def scaling(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[Row, float]]]:
    """(model, kind) -> rows by number of ranks, each with its efficiency against the smallest world."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in measured(rows):
        if row.get("scaling"):
            found.setdefault((row["model"], row["scaling"]), []).append(row)
    out = {}
    for key, some in found.items():
        some.sort(key=lambda row: row["ranks"])
        out[key] = list(zip(some, efficiency(some, key[1]), strict=True))
    return out
