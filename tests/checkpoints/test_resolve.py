from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from oasr_core.checkpoints.bundle import CheckpointBundle
from oasr_core.checkpoints.first_party import likely_distributions
from oasr_core.checkpoints.native import save_native
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.checkpoints.pretrained import PretrainedModel
from oasr_core.checkpoints.resolve import choose_converter, resolve_checkpoint
from oasr_core.errors import CheckpointError
from oasr_core.registry import how_to_install, registry


@pytest.fixture
def install():
    """Registers converters for the test under the names of its keywords."""
    with ExitStack() as stack:

        def install(**converters):
            for name, converter in converters.items():
                stack.enter_context(registry("converters").override(name, converter))

        yield install


@pytest.fixture
def directory(tmp_path):
    root = tmp_path / "model"
    root.mkdir()
    (root / "marker.txt").write_text("here")
    (root / "weights.pt").write_text("weights")
    return root


@pytest.fixture
def bundle(tiny_bundle):
    """Makes a bundle that remembers what its converter was given."""

    def make(peek, checkpoint_name):
        return CheckpointBundle(
            architecture="tiny",
            config={"path": peek.path.name, "checkpoint_name": checkpoint_name},
            state_dict={},
            tokenizer=tiny_bundle.tokenizer,
            feature=tiny_bundle.feature,
        )

    return make


def test_the_highest_rank_wins(install, directory, make_converter, bundle):
    install(layout=make_converter(10), keyed=make_converter(30, bundle=bundle), named=make_converter(20))
    resolved = resolve_checkpoint(directory)
    assert resolved.converter == "keyed"
    assert resolved.source == str(directory)
    assert resolve_checkpoint(str(directory), checkpoint_name="avg.pt").config["checkpoint_name"] == "avg.pt"


def test_a_tie_of_two_converters_names_both(install, directory, make_converter):
    install(one=make_converter(20), two=make_converter(20), three=make_converter(10))
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(directory)
    message = str(caught.value)
    assert "claimed with equal rank 20 by converter 'one' of in-process (marker.txt) and converter 'two'" in message
    assert "architecture='one' or architecture='two'" in message
    assert "three" not in message


def test_a_detect_that_raises_is_reported_and_stops_nobody(install, directory, make_converter, bundle, caplog):
    install(broken=make_converter(error=RuntimeError("boom")), good=make_converter(20, bundle=bundle))
    with caplog.at_level(logging.WARNING):
        assert resolve_checkpoint(directory).converter == "good"
    assert "converter 'broken' of in-process failed while looking: RuntimeError: boom" in caplog.text


def test_nobody_claims(install, tmp_path, make_converter):
    (tmp_path / "readme.md").touch()
    install(
        broken=make_converter(error=RuntimeError("boom")),
        silent=make_converter(20, wants="marker.txt"),
        wrong=type("Wrong", (make_converter(20),), {"oasr_api": "1.0", "detect": lambda self, peek: True}),
    )
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(tmp_path)
    message = str(caught.value)
    assert f"No converter recognises {tmp_path} (it has: readme.md)" in message
    assert "converter 'silent' of in-process looked for marker.txt" in message
    assert "converter 'broken' of in-process failed while looking: RuntimeError: boom" in message
    assert "converter 'wrong' of in-process failed while looking: TypeError: detect() returned True" in message


@pytest.mark.parametrize(
    ("files", "distribution"),
    [
        ({"config.json": json.dumps({"model_type": "whisper"})}, "oasr-whisper"),
        ({"config.json": json.dumps({"model_type": "parakeet_ctc"})}, "oasr-nemotron"),
        ({"config.json": json.dumps({"model_type": "qwen2_audio"})}, "oasr-llm"),
        ({"config.yaml": "model: Paraformer\n"}, "oasr-paraformer"),
        ({"config.yaml": "model: BiCifParaformer\n"}, "oasr-paraformer"),
        ({"model.nemo": ""}, "oasr-nemotron"),
        ({"model.bin": "", "vocabulary.json": "[]"}, "oasr-whisper"),
        ({"data/lang_bpe_500/tokens.txt": ""}, "oasr-zipformer"),
        ({"exp/pretrained.pt": ""}, "oasr-zipformer"),
    ],
)
def test_a_known_format_is_that_of_a_plugin(tmp_path, files, distribution):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert [likely for likely, _ in likely_distributions(CheckpointPeek(tmp_path))] == [distribution]


def test_a_known_format_names_the_plugin_to_install(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio"}))
    with pytest.raises(
        CheckpointError,
        match=r"It looks like a checkpoint for oasr-llm \(config\.json with model_type: qwen2_audio\): pip install ",
    ):
        resolve_checkpoint(tmp_path)


def test_icefall_weights_are_known_by_their_tensors(tmp_path):
    torch.save({"model": {"encoder.encoders.0.layers.0.norm.bias": torch.zeros(1)}}, tmp_path / "pretrained.pt")
    assert likely_distributions(CheckpointPeek(tmp_path)) == [("oasr-zipformer", "pretrained.pt")]


@pytest.mark.parametrize("content", ["{", "[]", "3", "null", '{"model_type": 3}'])
def test_an_unreadable_configuration_gives_no_hint(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="No converter recognises") as caught:
        resolve_checkpoint(tmp_path)
    assert "It looks like" not in str(caught.value)


def test_a_configuration_that_is_no_yaml_is_told(install, tmp_path, make_converter, bundle, caplog):
    """The converter that would have read it says so; others are asked all the same, and nothing is logged."""
    (tmp_path / "train.yaml").write_text("encoder: conformer\nencoder_conf: a: b\n")
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(tmp_path)
    assert re.search(r"converter 'wenet' of .*train\.yaml is not valid YAML: line 2: ", str(caught.value))
    install(good=make_converter(20, bundle=bundle, wants="train.yaml"))
    assert resolve_checkpoint(tmp_path).converter == "good"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_refusal_says_who_was_asked_and_what_a_file_is(install, tmp_path, make_converter):
    (tmp_path / "text.txt").write_text("weights? no")
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(tmp_path / "text.txt")
    message = str(caught.value)
    assert "text.txt (it is a file, neither torch nor safetensors weights)" in message
    assert "converter 'native' of oasr-core" in message
    assert "--set architecture=NAME" in message


def test_a_missing_weights_file_names_the_setting(wenet_digits, tmp_path):
    for name in ("train.yaml", "units.txt", "global_cmvn"):
        shutil.copy(wenet_digits / name, tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"'final\.pt' is not in .*\(it has: global_cmvn, train\.yaml, units\.txt"
    ):
        resolve_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"--set checkpoint_name=FILE"):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize(("distribution", "planned"), [("oasr-llm", True), ("oasr-whisper", False)])
def test_hints_say_what_may_not_be_published(distribution, planned):
    assert how_to_install(distribution) == f"pip install {distribution}" + ", where it is published" * planned


def test_architecture_restricts_who_is_asked(install, directory, make_converter, bundle):
    install(
        one=make_converter(20, bundle=bundle),
        two=make_converter(20, bundle=bundle, architectures=("tiny", "other")),
        three=make_converter(30, architectures=("elsewhere",)),
    )
    assert choose_converter(directory, architecture="other").name == "two"
    assert resolve_checkpoint(directory, architecture="one").converter == "one"
    with pytest.raises(CheckpointError, match="equal rank 20"):
        resolve_checkpoint(directory, architecture="tiny")


def test_architecture_takes_a_single_converter_without_recognition(install, directory, make_converter, bundle):
    install(explicit=make_converter(None, bundle=bundle, architectures=("secret",)))
    with pytest.raises(CheckpointError, match="No converter recognises"):
        resolve_checkpoint(directory)
    assert resolve_checkpoint(directory, architecture="explicit").converter == "explicit"


def test_an_unknown_architecture_lists_the_known_ones(install, directory, make_converter):
    install(one=make_converter(20, architectures=("tiny",)))
    with pytest.raises(CheckpointError, match=r"architecture 'tinny'. Known: .*one.*tiny.*Did you mean 'tiny'"):
        resolve_checkpoint(directory, architecture="tinny")
    with pytest.raises(CheckpointError, match=r"architecture 'nemotron'.*pip install oasr-nemotron"):
        resolve_checkpoint(directory, architecture="nemotron")


def test_a_file_is_offered_alone_and_then_as_weights_of_its_directory(install, directory, make_converter, bundle):
    install(folder=make_converter(20, bundle=bundle))
    assert resolve_checkpoint(directory / "weights.pt").config == {"path": "model", "checkpoint_name": "weights.pt"}
    install(file=make_converter(30, bundle=bundle, wants="weights.pt"))
    assert resolve_checkpoint(directory / "weights.pt").config == {"path": "weights.pt", "checkpoint_name": None}


def test_a_native_bundle_comes_before_everything(install, tiny_bundle, tmp_path, make_converter):
    native = save_native(tiny_bundle, tmp_path / "native")
    (native / "marker.txt").touch()
    install(greedy=make_converter(1000))
    assert resolve_checkpoint(native).converter == "native"
    assert resolve_checkpoint(native / "model.safetensors").source == str(native)
    assert resolve_checkpoint(native, architecture="tiny").converter == "native"
    with pytest.raises(CheckpointError, match="holds the architecture 'tiny', but architecture='greedy' was asked for"):
        resolve_checkpoint(native, architecture="greedy")


def test_a_converter_that_fails_is_named(install, directory, make_converter):
    def fail(peek, checkpoint_name):
        raise KeyError("encoder_conf")

    install(failing=make_converter(20, bundle=fail))
    with pytest.raises(
        CheckpointError, match=r"converter 'failing' of in-process recognised .* KeyError: 'encoder_conf'"
    ):
        resolve_checkpoint(directory)
    install(failing=make_converter(20))
    with pytest.raises(CheckpointError, match="returned NoneType, expected a CheckpointBundle"):
        resolve_checkpoint(directory)


# --- where a checkpoint is -------------------------------------------------------------------------------------------


@pytest.fixture
def pretrained(directory):
    class Model(PretrainedModel):
        oasr_api = "1.0"
        description = "For tests."
        licence = "Apache-2.0"
        languages = ("en",)
        sample_rate = 16000
        where = directory

        @property
        def name(self):
            return "test-model"

        def path(self):
            return self.where

    with registry("pretrained").override("test-model", Model()):
        yield Model


def test_a_pretrained_name_is_resolved(install, pretrained, make_converter, bundle, tmp_path):
    install(good=make_converter(20, bundle=bundle))
    assert resolve_checkpoint("test-model").config["path"] == "model"
    assert resolve_checkpoint("in-process:test-model").source == "in-process:test-model"
    pretrained.where = tmp_path / "gone"
    with pytest.raises(CheckpointError, match=r"pretrained model 'test-model' says .*gone, which does not exist"):
        resolve_checkpoint("test-model")


def test_a_path_that_exists_comes_before_a_name(install, pretrained, make_converter, bundle, tmp_path, monkeypatch):
    (tmp_path / "cwd" / "test-model").mkdir(parents=True)
    (tmp_path / "cwd" / "test-model" / "marker.txt").touch()
    monkeypatch.chdir(tmp_path / "cwd")
    install(good=make_converter(20, bundle=bundle))
    assert resolve_checkpoint("test-model").config["path"] == "test-model"


def test_a_missing_checkpoint_lists_the_pretrained_names(pretrained, tmp_path):
    with pytest.raises(CheckpointError, match=r"installed: .*test-model.*Did you mean 'test-model'"):
        resolve_checkpoint("test-mdel")
    for name in (tmp_path / "nowhere", "x" * 5000, "a\0b", "~nobody-has-this-name/x/y"):
        with pytest.raises(CheckpointError, match="There is no checkpoint at"):
            resolve_checkpoint(name)
    with pytest.raises(
        CheckpointError, match=r"No checkpoint was given: expected a path, a Hub id, or one of .*test-model"
    ):
        resolve_checkpoint("")


def test_an_empty_directory_and_an_empty_file(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.pt").touch()
    for name in ("empty", "empty.pt"):
        with pytest.raises(CheckpointError, match="No converter recognises"):
            resolve_checkpoint(tmp_path / name)


def test_home_is_expanded(install, make_converter, bundle, directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    install(good=make_converter(20, bundle=bundle))
    assert resolve_checkpoint("~/model").config["path"] == Path(directory).name
