"""tests/bench/gpu_peers.py with a tiny model on the CPU: what it reports, and that its peers in
PyTorch compute the same function."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from bench import gpu_peers  # also puts tools on the path
from lib import torch_peers
from lib.tiny_models import model_class
from make_random_model import TABLE, Shape, model_tensors
from peft.helpers import DoraCaching
from safetensors.torch import load_file

TINY = ["--device", "cpu", "--shape", "tiny", "--rank", "8", "--context", "40"]


def bundle(folder: Path, script: str) -> dict[str, str]:
    """The environment with a bundle whose programs are all this script."""
    folder.mkdir()
    (folder / "COMMIT").write_text("abc1234\n")
    (folder / "run").write_text("#!/bin/sh\n" + script)
    (folder / "run").chmod(0o755)
    return dict(os.environ, DORAD_BUNDLE=str(folder))


def run(arguments: list[str], environment: dict[str, str]) -> tuple[list[dict], str]:
    """The JSON lines, and the table."""
    done = subprocess.run(
        [sys.executable, gpu_peers.__file__, *TINY, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines, table = done.stdout.split("\n\n", 1)
    return [json.loads(line) for line in lines.splitlines()], table


def test_every_case_of_every_peer_is_reported(tmp_path: Path) -> None:
    environment = bundle(
        tmp_path / "bundle",
        """
        [ "$*" = "cuda_step_bench --shape tiny --adapters 1 --rank 8 --batch 1,3 --context 40 \
--prefill 16" ] || exit 7
        echo '{"shape": "tiny", "copy_TBps": 4}'
        echo '{"work": "decode", "batch": 1, "adapters": 1, "ms": 0.25, "floor_ms": 0.1}'
        echo '{"work": "decode", "batch": 3, "adapters": 1, "ms": 0.5, "floor_ms": 0.2}'
        echo '{"work": "prefill", "tokens": 16, "adapters": 1, "ms": 0.75}'
        """,
    )
    (tmp_path / "vllm.py").write_text("raise ImportError('not for this machine')")
    environment["PYTHONPATH"] = str(tmp_path)
    arguments = ["--batch", "1,3", "--prefill", "16", "--only", "dorad-dora,dora-cached,vllm"]
    (first, *lines), table = run(arguments, environment)
    assert (first["shape"], first["dorad"]) == ("tiny", "abc1234")
    assert first["peft"] is not None
    cases = [("decode", 1), ("decode", 3), ("prefill", 16)]
    assert [(line["peer"], line["work"], line["size"]) for line in lines] == [
        (peer, *case) for peer in ("dorad-dora", "dora-cached", "vllm") for case in cases
    ]
    ours, cached, vllm = lines[:3], lines[3:6], lines[6:]
    assert [line["ms"] for line in ours] == [0.25, 0.5, 0.75]
    assert ours[0]["floor_ms"] == 0.1
    assert all(line["ms"] > 0 for line in cached)
    assert all("not for this machine" in line["failed"] for line in vllm)
    rows = [row for row in table.splitlines() if row.startswith("|")]
    assert rows[0] == "| ms | decode, batch 1 | decode, batch 3 | prefill 16 |"
    assert rows[2] == "| dorad, DoRA | 0.25 | 0.50 | 0.75 |"
    assert f"{cached[0]['ms']:.2f} ({cached[0]['ms'] / 0.25:.2f} ×)" in rows[3]
    assert rows[4] == "| vLLM, base | failed (1) | failed (1) | failed (1) |"
    assert "1. vLLM, base: ended with 1: ImportError: not for this machine" in table


@pytest.mark.parametrize(
    ("ending", "reason"),
    [("exec sleep 100", "not within 8 s"), ("echo out of memory >&2; exit 3", "out of memory")],
)
def test_what_was_measured_before_a_peer_failed_is_kept(
    tmp_path: Path, ending: str, reason: str
) -> None:
    line = '{"work": "decode", "batch": 1, "ms": 2, "floor_ms": 1}'
    environment = bundle(tmp_path / "bundle", f"echo '{line}'\n{ending}\n")
    arguments = ["--batch", "1", "--prefill", "16", "--only", "dorad-base", "--time-limit", "8"]
    (_, decode, prefill), table = run(arguments, environment)
    assert decode["ms"] == 2
    assert reason in prefill["failed"]
    assert "| dorad, base | 2.00 | failed (1) |" in table


def test_a_missing_bundle_is_told(tmp_path: Path) -> None:
    environment = dict(os.environ, DORAD_BUNDLE=str(tmp_path / "none"))
    arguments = ["--batch", "1", "--prefill", "0", "--only", "dorad-base"]
    (_, line), _ = run(arguments, environment)
    assert "no bundle at" in line["failed"]


@pytest.mark.parametrize("peer", ["base", "lora", "dora", "dora-cached", "compose"])
def test_peers_in_pytorch_are_measured(peer: str, tmp_path: Path) -> None:
    options = gpu_peers.parse([*TINY, "--batch", "1,2", "--prefill", "8"])
    report = gpu_peers.Report(tmp_path / "report.jsonl")
    torch_peers.measure(peer, options, report)
    results = report.read()
    assert list(results) == gpu_peers.cases(options)
    assert all(result["ms"] > 0 for result in results.values())


def test_a_case_that_fails_leaves_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(_model: torch.nn.Module, _options: object, batch: int) -> float:
        if batch == 1:
            raise torch.OutOfMemoryError("tried to\nallocate")
        return 1.0

    monkeypatch.setattr(torch_peers, "decode", decode)
    options = gpu_peers.parse([*TINY, "--batch", "1,2", "--prefill", "0"])
    report = gpu_peers.Report(tmp_path / "report.jsonl")
    torch_peers.measure("base", options, report)
    assert report.read() == {
        ("decode", 1): {"failed": "OutOfMemoryError: tried to allocate"},
        ("decode", 2): {"ms": 1.0},
    }


@torch.inference_mode()
def logits(peer: str) -> torch.Tensor:
    options = gpu_peers.parse(TINY)
    model = torch_peers.build(peer, options, torch.float32)
    with DoraCaching(peer == "dora-cached"):
        return model(torch.arange(24).view(2, 12)).logits.log_softmax(-1)


def test_all_forms_of_dora_are_the_same_function() -> None:
    dora = logits("dora")
    for peer in ("dora-cached", "compose"):
        torch.testing.assert_close(logits(peer), dora, rtol=0, atol=1e-4)
    assert (logits("lora") - dora).abs().max() > 1e-2
    assert (logits("base") - dora).abs().max() > 1e-2


class Clock:
    """For perf_counter; goes on when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def with_vllm(monkeypatch: pytest.MonkeyPatch, engine: type) -> ModuleType:
    """lib.vllm_peer over an engine in vLLM's place."""

    def request(_name: str, _id: int, path: str) -> SimpleNamespace:
        return SimpleNamespace(path=path)

    stand_ins = {
        "vllm": SimpleNamespace(LLM=engine, SamplingParams=SimpleNamespace),
        "vllm.lora": SimpleNamespace(),
        "vllm.lora.request": SimpleNamespace(LoRARequest=request),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "lib.vllm_peer", raising=False)
    return importlib.import_module("lib.vllm_peer")


@pytest.mark.parametrize("peer", ["vllm", "vllm-lora"])
def test_vllm_steps_are_differences_of_generations(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine in vLLM's place that takes 0.1 s a prompt and 2 ms a token."""
    clock = Clock()

    class Engine:
        def __init__(self, model: str, **settings: object) -> None:
            assert transformers.AutoConfig.from_pretrained(model).num_hidden_layers == 2
            assert settings["max_num_seqs"] == 3
            assert settings.get("max_lora_rank") == (8 if peer == "vllm-lora" else None)

        def generate(self, prompts, sampling, use_tqdm, lora_request) -> list:
            lengths = {len(prompt["prompt_token_ids"]) for prompt in prompts}
            assert lengths == ({16} if sampling.max_tokens == 1 else {200 - 144})
            assert (lora_request is None) == (peer == "vllm")
            if lora_request:
                tensors = load_file(f"{lora_request.path}/adapter_model.safetensors")
                assert len(tensors) == 2 * 2 * 7  # and no magnitudes
            clock.now += 0.1 * len(prompts) + 0.002 * sampling.max_tokens
            output = SimpleNamespace(token_ids=[0] * sampling.max_tokens)
            return [SimpleNamespace(outputs=[output]) for _ in prompts]

    vllm_peer = with_vllm(monkeypatch, Engine)
    monkeypatch.setattr(vllm_peer.time, "perf_counter", clock)
    options = gpu_peers.parse([*TINY, "--context", "200", "--batch", "1,3", "--prefill", "16"])
    report = gpu_peers.Report(tmp_path / "report.jsonl")
    vllm_peer.measure(peer, options, report)
    assert report.read() == {
        ("decode", 1): {"ms": 2.0},
        ("decode", 3): {"ms": 2.0},
        ("prefill", 16): {"ms": 102.0},
    }


def test_prompts_with_images_are_measured(tmp_path: Path) -> None:
    environment = bundle(
        tmp_path / "bundle",
        """
        [ "$*" = "cuda_image_bench --shape tiny --adapters 0 --rank 8 --patches -1 --steps 0 \
--requests 4" ] || exit 7
        echo '{"shape": "tiny", "layers": 2}'
        echo '{"work": "image prompt", "rank": 0, "ms": 50}'
        echo '{"work": "image prompts", "rank": 0, "count": 4, "ms": 40, "images_per_s": 25}'
        """,
    )
    lines, table = run(["--batch", "0", "--images", "4", "--only", "dorad-base"], environment)
    assert [(line["work"], line["size"], line["ms"]) for line in lines[1:]] == [
        ("image", 1, 50),
        ("images", 4, 40),
    ]
    assert "| ms | an image, first token | of 4 images, each |" in table
    assert "| dorad, base | 50.00 | 40.00 |" in table


def test_images_are_not_for_peers_in_pytorch(capsys: pytest.CaptureFixture) -> None:
    able = ["dorad-base", "dorad-dora", "vllm", "vllm-lora"]
    assert gpu_peers.parse(["--images", "4"]).only == able
    with pytest.raises(SystemExit):
        gpu_peers.parse(["--images", "4", "--only", "dora"])
    assert "--images takes --only of " + ",".join(able) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("qwen3-vl-8b", [151652, 151655, 151653]),
        ("gemma3-27b", [255999]),
        ("mistral-small-24b", [10]),
    ],
)
def test_vllm_gets_processed_images_that_it_has_not_seen(
    name: str, ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine in vLLM's place that takes 3 ms a step, of at most two prompts."""
    clock, seen = Clock(), set()

    class LLM:
        def __init__(self, model: str, **settings: object) -> None:
            assert settings["limit_mm_per_prompt"] == {"image": 1, "video": 0}
            assert not settings["skip_tokenizer_init"]
            assert settings["compilation_config"]["mode"] == 0
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            assert tokenizer.convert_ids_to_tokens(ids[0]) != tokenizer.unk_token
            self.renderer = self.llm_engine = self
            self.waiting = 0

        def render_cmpl(self, prompts: list[dict]) -> list[dict]:
            for prompt in prompts:
                others = [i for i in prompt["prompt_token_ids"] if not 1000 <= i < 1016]
                assert others == ids
                assert prompt["multi_modal_data"]["image"].size in [(1024, 1024), (896, 896)]
            return [{"type": "multimodal", "mm_hashes": {"image": ["x"]}} for _ in prompts]

        def add_request(self, _id: str, prompt: dict, _sampling, lora_request) -> None:
            (image,) = prompt["mm_hashes"]["image"]
            assert image not in seen and lora_request is None
            seen.add(image)
            self.waiting += 1

        def has_unfinished_requests(self) -> bool:
            return self.waiting > 0

        def step(self) -> list:
            clock.now += 0.003
            done = min(2, self.waiting)
            self.waiting -= done
            return [None] * done

    vllm_peer = with_vllm(monkeypatch, LLM)
    monkeypatch.setattr(vllm_peer.time, "perf_counter", clock)
    arguments = ["--device", "cpu", "--shape", name, "--layers", "6", "--batch", "0"]
    options = gpu_peers.parse([*arguments, "--images", "4", "--no-vllm-compiles"])
    report = gpu_peers.Report(tmp_path / "report.jsonl")
    vllm_peer.measure("vllm", options, report)
    assert report.read() == {("image", 1): {"ms": 3.0}, ("images", 4): {"ms": 1.5}}


def shapes() -> list[Shape]:
    """Those of texts, and those of whole models."""
    with_tower = [name for name, shape in TABLE.items() if "tower" in shape]
    found = [Shape.read(name, 4) for name in TABLE]
    return found + [Shape.read(name, 4, tower=True) for name in with_tower]


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.whole()["architectures"][0])
def test_random_models_have_the_tensors_that_transformers_wants(shape: Shape) -> None:
    config = transformers.AutoConfig.for_model(**shape.whole())
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if shape.config["tie_word_embeddings"]:
        del wanted["lm_head.weight"]
    assert {tensor.name: tensor.shape for tensor in model_tensors(shape)} == wanted
