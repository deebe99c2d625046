"""What is saved comes back, whatever its keys and kinds, or is refused by name while the program that made it runs."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.saved_streams import restored, saved
from surefoot.errors import StateMismatch, StateNotRestorable
from surefoot.state import Program
from surefoot.state.entries import escaped, is_plain, joined, unescaped
from surefoot.state.tensor_building import first_difference


def program(objects: dict[str, Any], rank: int = 0, world: int = 1) -> Program:
    return Program(objects, (rank, world), (), seed=11)


def there_and_back(old: dict[str, Any], new: dict[str, Any], worlds: tuple[int, int] = (1, 1)) -> None:
    before, after = worlds
    streams = [saved(program(old, rank, before), rank, 3) for rank in range(before)]
    for rank in range(after):
        restored(program(new, rank, after), streams, rank, after, 3)


def model(seed: int, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(100 + step)
        x = torch.randn(5, next(net.parameters()).shape[-1])

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(x).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]  # a closure gives its loss
    return losses


class Kept:
    """An object whose state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


keys = st.text(max_size=6) | st.sampled_from(
    ["master", "a/b", "a:b", "~own", "~groups", "groups", "%2F", "", "\x00tensor"]
)
any_key = keys | st.integers() | st.tuples(st.integers(), keys)
tensors = st.builds(
    lambda shape, dtype, seed: (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.integers(0, 9),
)
trees = st.recursive(
    tensors | st.none() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: (
        st.dictionaries(any_key, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.lists(inner, max_size=2).map(lambda items: deque(items, 4))
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if first_difference(a, b) is not None:
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(st.lists(any_key, max_size=8, unique_by=repr))
def test_no_two_keys_share_a_name_and_names_are_taken_apart_again(several: list[Any]) -> None:
    names = [escaped(key) for key in several]
    assert len(set(names)) == len(names)
    assert all(not is_plain(joined("a", key)) and "/" not in escaped(key) for key in several)
    assert [unescaped(n) for n in names if is_plain(n)] == [k for k in several if type(k) is str]


@settings(max_examples=60, deadline=None)
@given(trees)
def test_any_nested_state_of_an_object_comes_back(tree: Any) -> None:
    old, new = Kept(tree), Kept(None)
    there_and_back({"ema": old}, {"ema": new})
    assert same(new.value, old.value)


@pytest.mark.gate_only
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(any_key, trees, max_size=3), min_size=4, max_size=4),
    st.dictionaries(keys, trees, max_size=2),
)
def test_any_state_of_an_optimizer_comes_back_under_parameters_and_beside_them(
    states: list[dict[Any, Any]], loose: dict[str, Any]
) -> None:
    net, other = model(1), model(2)
    old, new = (torch.optim.SGD(n.parameters(), 0.1) for n in (net, other))
    for parameter, state in zip(net.parameters(), states, strict=True):
        old.state[parameter] = dict(state)
    old.state.update(loose)
    there_and_back({"model": net, "optimizer": old}, {"model": other, "optimizer": new}, (2, 3))
    for parameter, state in zip(other.parameters(), states, strict=True):
        assert same(dict(new.state.get(parameter, {})), state)
    assert same({k: v for k, v in new.state.items() if not isinstance(k, torch.Tensor)}, loose)


def test_names_of_modules_and_parameters_may_hold_any_character() -> None:
    def built(fill: float) -> dict[str, Any]:
        net = nn.ModuleDict(
            {"a/b": nn.ParameterDict({"c:d": nn.Parameter(torch.full((2,), fill))}), "a": nn.Linear(1, 1)}
        )
        return {"groups": net, "optimizer": torch.optim.AdamW(net.parameters(), torch.tensor(fill))}

    old, new = built(1.0), built(2.0)
    for parameter in old["groups"].parameters():
        parameter.grad = torch.ones_like(parameter)
    old["optimizer"].step()
    there_and_back(old, new)
    assert torch.equal(new["groups"]["a/b"]["c:d"], old["groups"]["a/b"]["c:d"])
    assert len(new["optimizer"].state) == 3
    assert new["optimizer"].param_groups[0]["lr"] == 1.0


# ---- optimizers -----------------------------------------------------------------------------------------------------

_OF_TORCH: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain": partial(torch.optim.SGD, lr=0.1),
    "fused": partial(torch.optim.AdamW, fused=True),
    "tensor_rate": partial(torch.optim.AdamW, lr=torch.tensor(0.01), amsgrad=True),
    "history": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=2),
    **{name: getattr(torch.optim, name) for name in ("NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD")},
    **{name: getattr(torch.optim, name) for name in ("RMSprop", "Rprop", "Adafactor", "Adam")},
}


def goes_on_as_if_nothing_had_been(make: Any, width: int = 4, inputs: int = 3) -> None:
    def fresh(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 2))

    net = fresh(1)
    optimizer = make(list(net.parameters()))
    train(net, optimizer, range(3))
    other = fresh(2)
    again = make(list(other.parameters()))
    there_and_back({"model": net, "optimizer": optimizer}, {"model": other, "optimizer": again})
    assert train(other, again, range(3, 6)) == train(net, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", sorted(_OF_TORCH))
def test_training_goes_on_to_the_bit_with_each_optimizer_of_torch(name: str) -> None:
    goes_on_as_if_nothing_had_been(_OF_TORCH[name])


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_tensor_subclasses_in_an_optimizer_are_built_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # it compiles each step, which takes longer than all else
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    optim = pytest.importorskip("torchao.optim")
    goes_on_as_if_nothing_had_been(lambda parameters: getattr(optim, name)(parameters, 1e-2), width=256, inputs=16)


class Late(torch.optim.SGD):
    """Tensors in its groups from the first step on, a class in them before, and more in its state dict than torch has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.rounds = 0
        self.param_groups[0]["kind"] = Kept
        self.register_state_dict_post_hook(lambda _, state: state.update(late={"rounds": self.rounds}))
        self.register_load_state_dict_pre_hook(lambda _, state: setattr(self, "rounds", state["late"]["rounds"]))

    def step(self, closure: Any = None) -> Any:
        self.rounds += 1
        self.param_groups[0]["before"] = torch.tensor(float(self.rounds))
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_keeps_elsewhere_comes_back_too() -> None:
    net, other = model(1), model(2)
    old, new = Late(net.parameters()), Late(other.parameters())
    train(net, old, range(3))
    there_and_back({"model": net, "optimizer": old}, {"model": other, "optimizer": new})
    group = new.param_groups[0]
    assert (float(group["before"]), group["kind"], new.rounds, new.state["count"]) == (3.0, Kept, 3, 3)
    new.param_groups[0]["kind"] = Late
    with pytest.raises(StateMismatch, match=r"optimizer/groups/kind is .*:Kept in the checkpoint and .*Late.* here"):
        there_and_back({"model": net, "optimizer": old}, {"model": other, "optimizer": new})


# ---- what changes after the program was named --------------------------------------------------------------------------


def test_a_group_that_was_added_later_is_saved_and_one_without_state_is_refused_by_name() -> None:
    net = model(1)
    optimizer = torch.optim.AdamW(net[2].parameters())  # type: ignore[index]
    running = program({"model": net, "optimizer": optimizer})
    running.entries()
    short = saved(running, 0, 1)
    optimizer.add_param_group({"params": list(net[0].parameters())})  # type: ignore[index]
    train(net, optimizer, range(2))
    stream = saved(running, 0, 3)
    other = model(2)
    again = torch.optim.AdamW(other[2].parameters())  # type: ignore[index]
    again.add_param_group({"params": list(other[0].parameters())})  # type: ignore[index]
    restored(program({"model": other, "optimizer": again}), [stream], 0, 1, 3)
    assert train(other, again, range(2, 4)) == train(net, optimizer, range(2, 4))
    assert short.layout.stream_bytes < stream.layout.stream_bytes

    half = torch.optim.AdamW(net[2].parameters())  # type: ignore[index]
    train(net, half, range(1))
    stream = saved(program({"model": net, "optimizer": half}), 0, 3)
    with pytest.raises(StateMismatch, match=r"optimizer has model/0\.weight .* no state of it is in the checkpoint"):
        restored(program({"model": other, "optimizer": _of_all(other)}), [stream], 0, 1, 3)


def _of_all(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters())


def test_a_parameter_that_never_had_a_gradient_comes_back_without_state() -> None:
    net, other = model(1), model(2)
    old, new = _of_all(net), _of_all(other)
    for parameter in net[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    train(net, old, range(1))
    there_and_back({"model": net, "optimizer": old}, {"model": other, "optimizer": new})
    assert len(new.state) == 2


@pytest.mark.parametrize("how", ["assigned", "a new head", "a new buffer", "a new module"])
def test_what_was_replaced_in_a_model_is_saved_as_it_is_now(how: str) -> None:
    net = model(1)
    running = program({"model": net})
    running.entries()
    if how == "assigned":
        net.load_state_dict({k: v.clone() + 1 for k, v in net.state_dict().items()}, assign=True)
    elif how == "a new head":
        net[2] = nn.Linear(4, 7)  # type: ignore[operator]
    elif how == "a new buffer":
        net[0].register_buffer("seen", torch.arange(3.0))  # type: ignore[index,union-attr,operator]
    else:
        net.append(nn.Linear(2, 2))  # type: ignore[operator]
    other = copy.deepcopy(net)
    for tensor in other.state_dict().values():
        tensor.zero_()
    restored(program({"model": other}), [saved(running, 0, 3)], 0, 1, 3)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


def test_an_optimizer_of_parameters_that_the_model_no_longer_has_is_refused() -> None:
    net = model(1)
    running = program({"model": net, "optimizer": _of_all(net)})
    running.entries()
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    with pytest.raises(StateNotRestorable, match="parameter 0 of group 0 of optimizer belongs to no model"):
        running.entries()


# ---- refused while it runs ---------------------------------------------------------------------------------------------


class Odd:
    """No kind of value."""


class Mode(enum.Enum):
    TRAIN = 1


@dataclass
class Progress:
    seen: int
    mean: torch.Tensor


def test_values_that_programs_keep_come_back() -> None:
    value = {"mode": Mode.TRAIN, "at": Progress(3, torch.ones(2)), "dtype": torch.bfloat16, "size": torch.Size([2, 3])}
    new = Kept(None)
    there_and_back({"ema": Kept(value)}, {"ema": new})
    assert first_difference(new.value, value) is None
    assert torch.equal(new.value["at"].mean, torch.ones(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Odd(), r"parts\.ema\.value is a .*Odd, which cannot be saved"),
        ({"deep": [Odd()]}, r"parts\.ema\.value\.deep\[0\] is a .*Odd"),
        ({torch.nn.Identity(): 1}, r"a key of parts\.ema\.value is a torch\.nn"),
        (torch.zeros(2).to_sparse(), r"ema/value is a sparse_coo cpu tensor"),
        (lambda: 0, r"parts\.ema\.value is of .*lambda.*define it at the top of a module"),
    ],
)
def test_what_could_not_come_back_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(StateNotRestorable, match=message):
        program({"ema": Kept(value)}).check_restorable()


def test_proving_changes_nothing_and_calls_nothing_that_loads() -> None:
    net = model(1)
    optimizer = _of_all(net)
    train(net, optimizer, range(2))
    loads: list[Any] = []
    ema = Kept(torch.ones(2))
    ema.load_state_dict = loads.append  # type: ignore[method-assign]
    optimizer.register_load_state_dict_pre_hook(lambda *_: loads.append(1))
    before, state = torch.get_rng_state(), {id(p): {**s} for p, s in optimizer.state.items()}
    program({"model": net, "optimizer": optimizer, "ema": ema}).check_restorable()
    assert not loads
    assert torch.equal(torch.get_rng_state(), before)
    assert all(state[id(p)][k] is v for p, s in optimizer.state.items() for k, v in s.items())
