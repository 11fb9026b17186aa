"""A strategy on scripted networks: tables of logits, a predictor whose state is opaque, and textbook searches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderOutput
from oasr_core.testing.decoding import ByteTokenizer
from oasr_transducer.networks import Transducer
from oasr_transducer.options import TransducerOptions
from oasr_transducer.strategy import TransducerStrategy

INF = math.inf
_CONTEXTS = 7


def mix(context, token):
    """The context behind a token: the whole history counts, as in a recurrent predictor."""
    return (context * 3 + token + 1) % _CONTEXTS


@dataclass(frozen=True)
class History:
    """A state that nothing but its predictor can read."""

    values: torch.Tensor


class ScriptedPredictor:
    """Says the number of the history; counts the rows that it is run for."""

    context_size = 2

    def __init__(self):
        self.rows = 0

    def init(self, batch):
        return History(torch.zeros(batch, dtype=torch.int64))

    def step(self, tokens, state):
        self.rows += len(tokens)
        following = mix(state.values, tokens)
        return following[:, None].float(), History(following)

    def select(self, state, rows):
        return History(state.values[rows])

    def concat(self, states):
        return History(torch.cat([state.values for state in states]))


class ScriptedJoiner:
    """Logits are looked up by the number of the frame and of the history; a frame that is none cannot be looked up."""

    def __init__(self, table):
        self.table = table

    def project_encoder(self, hidden):
        return hidden

    def project_predictor(self, out):
        return out

    def joint(self, encoder, predictor):
        frames, contexts = torch.broadcast_tensors(encoder[..., 0], predictor[..., 0])
        if frames.isnan().any():
            raise AssertionError("a frame past the end of its row was looked at")
        return self.table[frames.long(), contexts.long()]


@dataclass
class Script:
    """Utterances as lists of frame numbers, and what the networks say of each."""

    table: torch.Tensor
    interface: Transducer

    def strategy(self, **options):
        model = SimpleNamespace(interfaces={"transducer": self.interface})
        return TransducerStrategy(DecodeContext(model, ByteTokenizer(), TransducerOptions(**options)))

    def log_probs(self, frame, context, penalty=0.0):
        labels = self.table[frame, context][: self.interface.vocab_size].clone()
        labels[self.interface.blank_id] -= penalty
        return labels.log_softmax(0).tolist()

    @property
    def start(self):
        return mix(0, self.interface.blank_id)

    @property
    def silent(self):
        return {self.interface.blank_id, self.interface.unk_id}


@pytest.fixture(scope="session")
def make_script():
    """``make_script(seed, ...) -> Script``: random tables, blank made likely enough for silences."""

    def build(seed, *, vocab_size=6, frames=20, blank_id=0, unk_id=None, durations=None, max_sym=1, blank_bias=1.5):
        generator = torch.Generator().manual_seed(seed)
        outputs = vocab_size + len(durations or ())
        table = torch.randn(frames, _CONTEXTS, outputs, generator=generator) * 1.5
        table[..., blank_id] += blank_bias
        interface = Transducer(
            ScriptedPredictor(), ScriptedJoiner(table), vocab_size, blank_id, unk_id, max_sym, durations
        )
        return Script(table, interface)

    return build


@pytest.fixture(scope="session")
def as_output():
    """Frame numbers of utterances as an encoder's output; ``padding`` fills the rest."""

    def build(utterances, padding=math.nan):
        longest = max(map(len, utterances), default=0)
        hidden = torch.full((len(utterances), longest, 1), padding)
        for row, frames in enumerate(utterances):
            hidden[row, : len(frames), 0] = torch.tensor(frames, dtype=torch.float32)
        return EncoderOutput(hidden, torch.tensor([len(frames) for frames in utterances], dtype=torch.int64))

    return build


@pytest.fixture(scope="session")
def textbook_greedy():
    """One utterance, one point at a time: tokens, frames, log posteriors, score."""

    def decode(script, frames, *, max_sym=1, penalty=0.0):
        durations = script.interface.durations
        context, time, symbols = script.start, 0, 0
        result = SimpleNamespace(tokens=[], frames=[], log_probs=[], score=0.0)
        while time < len(frames):
            row = script.log_probs(frames[time], context, penalty)
            label = max(range(len(row)), key=row.__getitem__)
            result.score += row[label]
            advance = 0
            if durations is not None:
                ahead = script.table[frames[time], context][script.interface.vocab_size :].log_softmax(0)
                advance = durations[int(ahead.argmax())]
                result.score += float(ahead.max())
            if label in script.silent:
                advance = max(advance, 1)
            else:
                result.tokens.append(label)
                result.frames.append(time)
                result.log_probs.append(row[label])
                context, symbols = mix(context, label), symbols + 1
                if advance == 0 and symbols == max_sym:
                    advance = 1
            if advance:
                time, symbols = time + advance, 0
        return result

    return decode


@pytest.fixture(scope="session")
def textbook_beam():
    """Modified beam search with a dictionary of hypotheses: ``[(tokens, log_prob, kept, frames, log_probs)]``, ranked.

    ``score_context(tokens) -> (completed, pending)``.
    """

    def decode(script, frames, *, beam_size=4, penalty=0.0, score_context=lambda tokens: (0.0, 0.0)):
        beam = {(): (0.0, [], [], script.start)}
        for time, frame in enumerate(frames):
            candidates = []
            for tokens, (log_prob, times, posteriors, context) in beam.items():
                for label, posterior in enumerate(script.log_probs(frame, context, penalty)):
                    entry = (log_prob + posterior, times, posteriors, context)
                    spelled = tokens
                    if label not in script.silent:
                        spelled = (*tokens, label)
                        entry = (entry[0], [*times, time], [*posteriors, posterior], mix(context, label))
                    candidates.append((entry[0] + sum(score_context(spelled)), spelled, entry))
            candidates.sort(key=lambda candidate: -candidate[0])
            beam = {}
            for _, spelled, entry in candidates[:beam_size]:
                known = beam.get(spelled)
                if known is not None:
                    top, low = max(known[0], entry[0]), min(known[0], entry[0])
                    entry = (top + math.log1p(math.exp(low - top)), *known[1:])
                beam[spelled] = entry
        results = [
            (list(tokens), log_prob, score_context(tokens)[0], times, posteriors)
            for tokens, (log_prob, times, posteriors, _) in beam.items()
        ]
        return sorted(results, key=lambda item: -(item[1] + item[2]) / (len(item[0]) + 2))

    return decode


@pytest.fixture
def on_a_device(monkeypatch):
    """The CPU taken for a device on which the host would have to wait."""
    for module in ("prediction", "greedy"):
        monkeypatch.setattr(f"oasr_transducer.{module}.reads_are_free", lambda device: False)


@pytest.fixture(scope="session")
def icefall_digits(request, repo_root):
    """The trained icefall digits checkpoint with its oracle."""
    own = repo_root / "tests" / "data" / "icefall_digits"
    return own if own.is_dir() else request.getfixturevalue("shared_fixtures") / "icefall_digits"
