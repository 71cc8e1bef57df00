"""Folders of quantized models: who may go on with a run, what is damaged in it, and what hashes see of a model."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

import lowbit_attn.linear.hf  # noqa: E402, F401
from lowbit_attn.linear import VersionError, WeightFileError  # noqa: E402
from lowbit_attn.linear.checkpoint import quantize_model  # noqa: E402
from lowbit_attn.linear.run import FolderError, begun, identity  # noqa: E402

SIZES = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
             num_hidden_layers=2, vocab_size=32, max_position_embeddings=1024, initializer_range=0.2)
IDS = torch.randint(0, 32, (2048,), generator=torch.Generator().manual_seed(5))


def build(**options):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options)).eval()


class Broken(Exception):
    pass


def write(folder: Path, stop_after: int | None = None, **options) -> None:
    def stop(done, total, what):
        if done == stop_after:
            raise Broken

    quantize_model(build(**options), None, IDS, "e8p2", folder, 2048, on_layer=stop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished model."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    write(folder)
    return folder


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory) -> Path:
    """A run that ended after its first layer."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    with pytest.raises(Broken):
        write(folder, stop_after=2)
    assert names(folder) == ["hidden.safetensors", "layer-00000.safetensors", "layer-00001.safetensors",
                             "progress.json"]
    return folder


@pytest.fixture
def run(broken_off, tmp_path) -> Path:
    return Path(shutil.copytree(broken_off, tmp_path / "run"))


@pytest.fixture
def model(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


# ---- a run


@pytest.mark.parametrize("options", [
    dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}), dict(rms_norm_eps=1e-3),
    dict(max_position_embeddings=2048)])
def test_the_configuration_is_part_of_the_run(run, options):
    before = contents(run)
    with pytest.raises(FolderError, match="holds an unfinished run with another model or text"):
        write(run, **options)
    assert contents(run) == before


def test_weights_with_equal_sums_are_another_model():
    one, two = build(), build()
    two.model.layers[0].mlp.up_proj.weight.data = two.model.layers[0].mlp.up_proj.weight.data.flip(0)
    rows = IDS.reshape(-1, 512)
    assert identity(one, rows, "e8p2", 0) == identity(build(), rows, "e8p2", 0) != identity(two, rows, "e8p2", 0)


def test_one_process_works_in_a_folder(tmp_path, whole):
    folder = tmp_path / "model"
    about = identity(build(), IDS.reshape(-1, 512), "e8p2", 0)
    pid = os.fork()
    if not pid:
        with begun(folder, about):
            time.sleep(600)
    while not (folder / "progress.json").exists():
        time.sleep(0.01)
    with pytest.raises(FolderError, match="out: another process writes into"):
        write(folder)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (folder / ".lowbit_attn-0123456789ab-0.part").mkdir()  # as of a writer that was killed
    write(folder)
    assert contents(folder) == contents(whole)


def test_other_folders_are_left_as_they_are(tmp_path, whole):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    with pytest.raises(FolderError, match="is not empty, supported: an empty folder"):
        write(tmp_path / "mine")
    assert names(tmp_path / "mine") == ["notes.txt"]
    file = tmp_path / "mine/notes.txt"
    for path in (file, file / "below", Path("/proc/none"), tmp_path / "nul\0"):
        with pytest.raises(FolderError, match="out: got .*supported: a folder that can be made"):
            write(path)


def test_a_run_that_ended_while_it_was_tidied_up_is_finished(whole, run):
    about = json.loads((run / "progress.json").read_text())
    for path in whole.iterdir():
        shutil.copy(path, run)
    (run / "progress.json").write_text(json.dumps(about | {"finished": True}))
    (run / "run.lock").touch()
    (run / "layer-00000.safetensors").unlink()
    write(run)
    assert contents(run) == contents(whole)


def flipped(path: Path, place: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [
    lambda run: flipped(run / "layer-00000.safetensors"), lambda run: flipped(run / "hidden.safetensors"),
    lambda run: (run / "layer-00001.safetensors").write_bytes((run / "layer-00001.safetensors").read_bytes()[:-9]),
    lambda run: shutil.copy(run / "layer-00000.safetensors", run / "layer-00001.safetensors"),
    lambda run: (run / "hidden.safetensors").write_bytes(b""), lambda run: (run / "progress.json").write_text("[]"),
    lambda run: (run / "progress.json").write_text("null"), lambda run: (run / "progress.json").write_text(""),
    lambda run: (run / "progress.json").write_text("[" * 100_000), lambda run: (run / "progress.json").write_text("{}"),
    lambda run: (run / "progress.json").write_bytes(b"\xff\xfe"),
])
def test_what_is_damaged_in_a_run_is_named(run, damage):
    damage(run)
    with pytest.raises(FolderError, match="out: .*(remove|supported)"):
        write(run)


# ---- a finished model


def configured(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def without(name: str):
    return lambda entries: entries.pop(name)


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("change, error", [
    (without("hash"), WeightFileError), (without("rest"), WeightFileError), (without("format"), WeightFileError),
    (without("modules"), WeightFileError), (without("version"), VersionError),
    (lambda entries: entries.update(format="e8p4"), WeightFileError),
    (lambda entries: entries.update(format=7), WeightFileError),
    (lambda entries: entries.update(version="1"), VersionError),
    (lambda entries: entries.update(version=1.0), VersionError),
    (lambda entries: entries.update(version=10**400), VersionError),
    (lambda entries: entries.update(modules=list(entries["modules"])), WeightFileError),
    (lambda entries: entries["modules"].pop(NAME), WeightFileError),
    (lambda entries: entries["modules"].update({NAME: "0" * 64}), WeightFileError),
    (lambda entries: entries["modules"].update({NAME: None}), WeightFileError),
    (lambda entries: entries["modules"].update({"model.layers.9": "0" * 64}), WeightFileError),
    (lambda entries: entries.update(rest="0" * 64), WeightFileError),
    (lambda entries: entries.update(modules="x"), WeightFileError),
])
def test_what_a_configuration_says_is_in_its_hash(model, change, error):
    configured(model, change)
    with pytest.raises(error):
        load(model)


def tensors_changed(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change, words", [
    (lambda state: state[f"{NAME}.codes"].view(-1)[5:6].bitwise_xor_(1), f"{NAME} was changed"),
    (lambda state: state[f"{NAME}.scales"].mul_(2), f"{NAME} was changed"),
    (lambda state: state["model.norm.weight"].mul_(2), "tensors that are not quantized were changed"),
    (lambda state: state["model.embed_tokens.weight"].view(-1)[3:4].add_(1), "not quantized were changed"),
    (lambda state: state.update(extra=torch.zeros(1)), "not quantized were changed"),
    (lambda state: state.pop(f"{NAME}.codes"), f"{NAME}.codes is in no file"),
    (lambda state: state.pop("model.norm.weight"), "not quantized were changed"),
    (lambda state: state.update({f"{NAME}.codes": state[f"{NAME}.codes"][:1].clone()}), r"codes: got torch.uint8 \["),
    (lambda state: state.update({f"{NAME}.scales": state[f"{NAME}.scales"].half()}), "scales: got torch.float16"),
    (lambda state: state[f"{NAME}.header"].fill_(-1), "layout version -1"),
    (lambda state: state.update({f"{NAME}.header": torch.zeros(2, 2)}), r"of a header torch.float32 \[2, 2\]"),
])
def test_what_changes_in_a_models_tensors_is_seen(model, change, words):
    tensors_changed(model, change)
    with pytest.raises((WeightFileError, VersionError), match=words):
        load(model)


def test_models_without_hashes_are_read_and_checked(model):
    want = load(model)(IDS[None, :32]).logits
    configured(model, lambda entries: (entries.pop("hash"), entries.pop("rest"),
                                       entries.update(modules=list(entries["modules"]))))
    assert torch.equal(load(model)(IDS[None, :32]).logits, want)
    tensors_changed(model, lambda state: state[f"{NAME}.scales"].fill_(torch.nan))
    with pytest.raises(WeightFileError, match=f"{NAME}.scales: got a NaN"):
        load(model)


def test_a_matrix_that_cannot_be_quantized_is_named(tmp_path):
    model = build()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.inf)
    with pytest.raises(ValueError, match="model: layer 1: mlp.down_proj: .*(w|hessian): got a NaN or an infinity"):
        quantize_model(model, None, IDS, "e8p2", tmp_path, 2048)
