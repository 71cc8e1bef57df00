"""perf/engine_server.py, engine_ranks.py and engine_quality.py without an engine."""

import json
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from perf_scripts import PERF, script
from typer.testing import CliRunner

# answers like vLLM's server, and has a process of its own that holds a port, as its engine does
SERVER = """
import http.server, json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', "
                          + sys.argv[2] + ")); s.listen(); time.sleep(600)"])

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, found):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def do_GET(self):
        self.answer({"version": "9.9"} if self.path == "/version" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f" of {body['model']}: {body['prompt']}"
        self.answer({"choices": [{"text": text}], "usage": {"completion_tokens": 3}})

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_the_servers_command_is_the_readmes():
    line = "vllm serve /models/x --attention-backend CUSTOM --kv-cache-dtype lowbit_k4v4 --block-size 128"
    with script("engine_server") as server:
        assert shlex.join(server.command(Path("/models/x"))) == line


def test_a_server_is_asked_and_ends_with_its_processes(tmp_path):
    port, other = free_ports(2)
    words = [sys.executable, "-c", SERVER, str(port), str(other)]
    with script("engine_server") as server, open(tmp_path / "log", "w") as log:
        found = server.exchange(words, Path("m"), log, 60.0, f"http://127.0.0.1:{port}")
        assert found["answer"] == f" of m: {server.QUESTION}" and found["tokens"] == 3 and found["server"] == "9.9"
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", other)):
                return
        time.sleep(0.1)
    pytest.fail("the server's own process is still there")


def test_a_server_that_ends_or_never_answers_leaves_a_line(tmp_path, monkeypatch):
    output, runner = tmp_path / "server.jsonl", CliRunner()
    with script("engine_server") as server:
        app = server.typer.Typer()
        app.command()(server.main)
        monkeypatch.setattr(server.importlib.metadata, "version", lambda name: "1")
        for code, reason in (("import sys; print('no GPU'); sys.exit(4)", "RuntimeError: the server ended with 4"),
                             ("import time; print('no GPU', flush=True); time.sleep(60)", "TimeoutError: no answer")):
            monkeypatch.setattr(server, "command", lambda model, code=code: [sys.executable, "-c", code])
            monkeypatch.setattr(server, "ADDRESS", f"http://127.0.0.1:{free_ports(1)[0]}")
            monkeypatch.setattr(server.exchange, "__defaults__", (server.ADDRESS,))
            done = runner.invoke(app, [str(tmp_path), "--output", str(output), "--seconds", "4"])
            assert done.exit_code == 1
            line = json.loads(output.read_text().splitlines()[-1])
            assert line["error"].startswith(reason) and "no GPU" in line["told"] and line["part"] == "server"


def test_answers_of_ranks_are_compared():
    step = [dict(zip("ab", (type("Entry", (), dict(logprob=value))() for value in pair)))
            for pair in ((-3.0, -0.5), (-1.0, -1.25))]
    with script("engine_ranks") as ranks:
        assert [ranks.ahead_of_second(one) for one in step] == [2.5, 0.25]
        one = dict(tokens=[[1, 2, 3], [4, 5, 6]], ahead=[[1.0, 2.0, 3.0], [4.0, 0.03, 6.0]], start_s=1.0)
        found = ranks.compared(one, dict(tokens=[[1, 2, 3], [4, 7, 6]], start_s=2.0))
    assert found == dict(same_tokens=[3, 1], of=[3, 3], gaps=[0.03], distinct_tokens=6, start_s=[1.0, 2.0])


def test_an_engine_of_ranks_that_fails_leaves_a_line(tmp_path, monkeypatch):
    output = tmp_path / "ranks.jsonl"
    with script("engine_ranks") as ranks:
        monkeypatch.setattr(ranks, "__file__", str(tmp_path / "fails.py"))
        (tmp_path / "fails.py").write_text("import sys; sys.exit('no such engine')")
        assert CliRunner().invoke(ranks.app, ["check", "--output", str(output)]).exit_code == 1
    line = json.loads(output.read_text())
    assert line["error"].startswith("no answer of [1, 2] ranks") and line["told"].count("no such engine") == 2


@pytest.mark.parametrize("name, kv_heads", [("MODEL", 4), ("DEALT", 1)])
def test_weights_of_the_models_for_ranks_are_a_llamas(tmp_path, name, kv_heads):
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    with script("engine_ranks") as ranks:
        folder = ranks.model_folder(tmp_path, getattr(ranks, name))
        assert getattr(ranks, name)["num_key_value_heads"] == kv_heads and max(ranks.LENGTHS) + ranks.NEW < 4096
    with safe_open(folder / "model.safetensors", "pt") as file:
        mine = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    import torch

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(str(folder)))
    assert mine == {name: tuple(x.shape) for name, x in model.state_dict().items()}


def test_caches_that_hold_what_the_engine_does(tmp_path):
    with script("engine_quality") as quality:
        assert quality.cache_options(tmp_path, "auto") is None
        assert quality.cache_options(tmp_path, "lowbit_k2v2-s32") == dict(format="k2v2", sinks=32)
        assert quality.cache_options(tmp_path, "lowbit_kitty-pro") == dict(format="kitty-pro", sinks=32)


def test_a_row_ends_with_what_it_started(tmp_path):
    port, = free_ports(1)
    child = f"import socket, time; s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen(); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    with script("engine") as engine, engine.group([sys.executable, "-c", parent], dict(), stderr=subprocess.PIPE):
        until = time.monotonic() + 30
        while not is_open(port):
            assert time.monotonic() < until
            time.sleep(0.05)
    until = time.monotonic() + 10
    while is_open(port):
        assert time.monotonic() < until, "the row's own process is still there"
        time.sleep(0.05)


def is_open(port: int) -> bool:
    with socket.socket() as asked:
        return not asked.connect_ex(("127.0.0.1", port))


def test_the_scripts_are_named_in_the_engines_own():
    assert all(name in (PERF / "engine.py").read_text() for name in ("perf/engine_server.py", "perf/engine_ranks.py"))
