"""docs/weights.md, "What it costs in quality": its numbers are those of lines of perf/results/weights.jsonl."""

import re

from shown_numbers import ROOT, found, in_text, is_rounded, newest, numbers, rows_of

from lowbit_attn.linear.formats import FORMATS

WEIGHTS = (ROOT / "docs/weights.md").read_text()
LABELS = {"int4 rounded to nearest, groups of 128": "int4 g128", "int2 rounded to nearest, groups of 64": "int2 g64"}


def label_of(name: str) -> str:
    return LABELS.get(name) or re.match(r"`?(16 bit|\w+)", name)[1]


def quality_lines(commit: str, label: str, cache: str) -> tuple[dict, dict]:
    """What a model with these weights has over a cache on the text, and of codes."""
    return tuple(newest("weights", commit, label=label, cache=cache, task=task) for task in (None, "recall"))


def test_models_with_codebook_weights():
    """Each row over a 16-bit cache and over kcq4vcq2, whose codebooks and sinks are those that the text names."""
    rows = rows_of(WEIGHTS, "What it costs in quality")
    learned, sinks = re.search(r"hash begins with (\w+)\); (\d+) sinks", " ".join(WEIGHTS.split())).groups()
    for name, bits, *cells, commit in rows:
        for shown, cache in ((cells[:4], "16 bit"), (cells[4:], "kcq4vcq2")):
            text, recall = quality_lines(commit, label_of(name), cache)
            values = (text["perplexity"], text["kl"], 100 * text["top1"], recall["right"])
            assert is_rounded(bits, text["bits_per_weight"]) and all(map(is_rounded, shown, values)), (name, cache)
            assert len(shown) == 4 and recall["questions"] == 40
            assert recall["tokens"] == 1439 or name == "`aqlm_2x12`"  # of another Python's help texts
        for line in (text, recall):
            assert line["codebooks"]["hash"].startswith(learned) and line["codebooks"]["model"] == "demo"
            assert line["sinks"] == int(sinks)
    missing = {f"`{name}`" for name, spec in FORMATS.items() if spec.book_size <= 4096 or name.startswith("e8p")}
    missing -= {row[0] for row in rows}
    assert len(rows) == 8 and not missing
    shown = numbers(WEIGHTS, "16-bit weights find # codes there, # over `kcq4vcq2`.")
    commit = next(row[-1] for row in rows if row[0] == "`aqlm_2x12`")
    for number, cache in zip(shown, ("16 bit", "kcq4vcq2"), strict=True):
        assert int(number) == quality_lines(commit, "16 bit", cache)[1]["right"]


def test_what_is_said_of_models_with_codebook_weights():
    commit = rows_of(WEIGHTS, "What it costs in quality")[0][-1]
    kl, cached, codes, over = {}, {}, {}, {}
    for label in ("16 bit", "e8p4", "e8p2", "gptvq2", "aqlm_2x8", "int4 g128"):
        (text, recall), (text_over, recall_over) = (quality_lines(commit, label, c) for c in ("16 bit", "kcq4vcq2"))
        kl[label], cached[label], codes[label], over[label] = (text["kl"], text_over["kl"], recall["right"],
                                                               recall_over["right"])
    assert in_text(WEIGHTS, "an eighth of the KL") and round(kl["int4 g128"] / kl["e8p4"]) == 8
    two = [kl[label] / kl["int4 g128"] for label in ("e8p2", "gptvq2", "aqlm_2x8")]
    assert all(map(is_rounded, numbers(WEIGHTS, "with # to # times the KL of 4 bits"), (min(two), max(two))))
    added, own = numbers(WEIGHTS, "The cache adds # to the KL of `e8p4`, and has # with 16-bit weights")
    assert is_rounded(added, cached["e8p4"] - kl["e8p4"]) and is_rounded(own, cached["16 bit"])
    assert all(cached[label] < kl[label] for label in ("e8p2", "gptvq2", "aqlm_2x8", "int4 g128"))
    shown = numbers(WEIGHTS, "`e8p4` finds # where 16-bit weights find #; over `kcq4vcq2` these find #, within the "
                             "error, and `e8p4` fewer, #, as 4 bits rounded to nearest over either cache (#)")
    assert [int(number) for number in shown] == [codes["e8p4"], codes["16 bit"], over["16 bit"], over["e8p4"],
                                                 codes["int4 g128"]] and codes["int4 g128"] == over["int4 g128"]
    most = max(found[label] for found in (codes, over) for label in ("e8p2", "gptvq2", "aqlm_2x8"))
    assert int(numbers(WEIGHTS, "none finds more than #.")[0].rstrip(".")) == most
    low, high, *errors = numbers(WEIGHTS, "Where # to # codes are found, one standard error is # to #.")
    for right in range(int(low), int(high) + 1):
        error = (right * (40 - right) / 39) ** 0.5
        assert float(errors[0]) - 0.5 <= error < float(errors[1].rstrip(".")) + 0.5


def test_earlier_models_with_codebook_weights():
    rows = rows_of(WEIGHTS, "Other runs, calibration text and damping")
    assert len(rows) == 7
    for name, bits, perplexity, kl, top1, commit in rows:
        said = re.search(r"([\d,]+) tokens, damping ([\d.]+)", name)
        lines = found("weights", commit, label=label_of(name), cache="16 bit")
        if "damping" in lines[-1]:  # older lines are of the defaults of their commit
            tokens, damping = int(said[1].replace(",", "")), float(said[2])
            lines = [x for x in lines if (x["calibration_tokens"], x["damping"]) == (tokens, damping)]
        line = lines[-1]
        assert is_rounded(bits, line["bits_per_weight"]) and is_rounded(perplexity, line["perplexity"]), name
        assert is_rounded(kl, line["kl"]) and is_rounded(top1, 100 * line["top1"]), name
    shown = numbers(WEIGHTS, "`e8p4` had a perplexity of # where these lines come from and has # above, `gptvq2` # and "
                             "#, `aqlm_2x8` # and #.")
    newer = {row[0]: row[2] for row in rows_of(WEIGHTS, "What it costs in quality")}
    for i, label in enumerate(("e8p4", "gptvq2", "aqlm_2x8")):
        earlier = next(row[2] for row in rows if row[0].startswith(f"`{label}`") and "defaults" in row[0])
        assert tuple(number.rstrip(".,") for number in shown[2 * i : 2 * i + 2]) == (earlier, newer[f"`{label}`"])


def test_single_matrices():
    table = re.search(r"^\| weights \| q_proj.*?(?=\n\n)", WEIGHTS, flags=re.M | re.S)[0].splitlines()[2:]
    errors = {line["label"]: line["errors"] for line in found("weights", "f8478633fe5e", layer=1)}
    assert len(table) == len(errors) == 6
    for row in table:
        label, *cells = (cell.strip(" `") for cell in row.split("|")[1:-1])
        for cell, pair in zip(cells, errors[label], strict=True):
            assert all(map(is_rounded, cell.split(", "), pair)), label
    held = {label: [pair[1] for pair in pairs] for label, pairs in errors.items()}
    two = [x / y for label in ("e8p2", "gptvq2", "aqlm_2x8") for x, y in zip(held[label], held["int2 g64"])]
    four = [100 * (1 - x / y) for x, y in zip(held["e8p4"], held["int4 g128"])]
    shown = numbers(WEIGHTS, "2-bit formats have # to # of the error of 2 bits rounded to nearest; `e8p4` is # to # % "
                             "below 4 bits rounded to nearest")
    assert all(map(is_rounded, shown, (min(two), max(two), min(four), max(four))))
    more = [100 * (held_out / read - 1) for label, pairs in errors.items() if label[:3] != "int"
            for read, held_out in pairs[2:]]
    assert all(map(is_rounded, numbers(WEIGHTS, "There down_proj is # to # % further off"), (min(more), max(more))))
