"""Damaged safetensors files, drawn from the format's own description: a length of 8 bytes, a header of JSON that names
dtype, shape and place of each tensor and a table of text, and the tensors' bytes."""

import copy
import json
import random
import struct

ODD_TEXT = ("", "null", "-1", "0", "1e9", "NaN", "[1]", "{}", '"x"', "9" * 5000, "[" * 20_000 + "]" * 20_000, "../../x",
            "True", "6_4", "\u0661", "a\x00b", "18446744073709551616")
ODD_NUMBERS = (-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, None, "8", [], {}, True)
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "F8_E4M3", "F4", "X9", "",
          None, 7)


def parts(content: bytes) -> tuple[dict, bytes]:
    """(header, tensors' bytes) of a whole file."""
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined(header: object, body: bytes, text: str | None = None) -> bytes:
    written = (json.dumps(header) if text is None else text).encode()
    written += b" " * (-len(written) % 8)
    return struct.pack("<Q", len(written)) + written + body


def of_bytes(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """A file whose bytes were damaged, whatever they mean."""
    made, size = bytearray(content), len(content)
    kind = rng.choice(("flip", "flip in the header", "cut", "zeros", "noise", "more", "length", "moved"))
    at = rng.randrange(size)
    if kind == "flip":
        made[at] ^= 1 << rng.randrange(8)
    elif kind == "flip in the header":
        made[rng.randrange(8 + struct.unpack("<Q", content[:8])[0])] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del made[at:]
    elif kind in ("zeros", "noise"):
        count = min(size - at, rng.choice((1, 8, 64, 4096)))
        made[at : at + count] = bytes(count) if kind == "zeros" else rng.randbytes(count)
    elif kind == "more":
        made[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
    elif kind == "length":
        made[:8] = struct.pack("<Q", rng.choice((0, 1, 7, size - 8, size, 99_000_000, 2**40, 2**63, 2**64 - 1)))
    else:
        del made[at : at + rng.choice((1, 8, 64))]
    return f"{kind} at {at}", bytes(made)


def of_header(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """A file whose header says something else of its tensors."""
    header, body = parts(content)
    header = copy.deepcopy(header)
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    kind = rng.choice(("dtype", "size", "shape", "place", "gone", "renamed", "extra", "twice", "nested", "table",
                       "entry"))
    if kind == "dtype":
        header[name]["dtype"] = rng.choice(DTYPES)
    elif kind == "size" and header[name]["shape"]:
        header[name]["shape"][rng.randrange(len(header[name]["shape"]))] = rng.choice(ODD_NUMBERS)
    elif kind in ("size", "shape"):
        others = [], [0], [2**62, 4], [1] * 70, header[name]["shape"][::-1] + [1], None, "x"
        header[name]["shape"] = rng.choice(others)
    elif kind == "place":
        header[name]["data_offsets"][rng.randrange(2)] = rng.choice(ODD_NUMBERS)
    elif kind == "gone":
        header.pop(name)
    elif kind == "renamed":
        header[rng.choice(("x", "", "__metadata__", "k" * 300))] = header.pop(name)
    elif kind == "extra":
        header["extra"] = {"dtype": "U8", "shape": [8], "data_offsets": [len(body), len(body) + 8]}
        body += bytes(8)
    elif kind == "twice":
        return f"{name} twice", joined(header, body, json.dumps(header)[:-1] + f', "{name}": {{"dtype": "U8"}}}}')
    elif kind == "nested":
        return "nested header", joined(header, body, "[" * 50_000 + "]" * 50_000)
    elif kind == "table":
        header["__metadata__"] = rng.choice((None, [], "x", 7, {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {}))
    else:
        header[name] = rng.choice((None, [], 7, {}, "x"))
    return f"{kind} of {name}", joined(header, body)


def of_text(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """A file whose table of text says something else."""
    header, body = parts(content)
    about = header["__metadata__"]
    name = rng.choice(sorted(about))
    kind = rng.choice(("gone", "odd", "odd", "digit", "new"))
    if kind == "gone":
        about.pop(name)
    elif kind == "odd":
        about[name] = rng.choice(ODD_TEXT)
    elif kind == "digit":
        at = rng.randrange(len(about[name]) + 1)
        about[name] = about[name][:at] + rng.choice("0123456789ax{}[]\",") + about[name][at:]
    else:
        about[rng.choice(("more", "", "x" * 1000))] = rng.choice(ODD_TEXT)
    return f"{kind} {name}: {about.get(name, '')[:30]!r}", joined(header, body)


def draw(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """(what was done, the damaged file); another one than ``content``."""
    while True:
        ways = (of_bytes, of_header, of_text) if parts(content)[0].get("__metadata__", {}).get("kind") else (
            of_bytes, of_header)
        said, made = rng.choice(ways)(rng, content)
        if made != content:
            return said, made
