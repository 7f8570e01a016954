"""Inject and eject are exact inverses, whatever lies over what and whatever goes wrong."""

from __future__ import annotations

from copy import deepcopy
from threading import Event, Thread

import pytest
import torch
from torch import nn

from fisedit.errors import AdapterError
from fisedit.models.injection import Injection, exclusive, injected


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x))


def plus(amount):
    """Adds to whatever was there before."""
    return lambda inner: lambda *args: inner(*args) + amount


@pytest.fixture
def model():
    return Model()


X = torch.ones(2, 3)


def untouched(model, before):
    return not any("forward" in vars(module) for module in model.modules()) and torch.equal(model(X), before)


def test_ejecting_leaves_no_trace(model):
    before, keys = model(X), list(model.state_dict())
    with Injection(model, [(model.second, plus(1.0)), (model.first, plus(2.0))]):
        assert not torch.equal(model(X), before)
        assert list(model.state_dict()) == keys
    assert untouched(model, before)


def test_injections_lie_over_one_another(model):
    before = model(X)
    with Injection(model, [(model.second, plus(1.0))]):
        once = model(X)
        with Injection(model, [(model.second, plus(2.0))]), Injection(model, [(model, plus(4.0))]):
            assert torch.allclose(model(X), before + 7.0)
        assert torch.equal(model(X), once)
    assert untouched(model, before)


def test_one_module_may_change_twice_at_once(model):
    before = model(X)
    with Injection(model, [(model.second, plus(1.0)), (model.second, plus(2.0))]):
        assert torch.allclose(model(X), before + 3.0)
    assert untouched(model, before)


def test_a_forward_of_its_own_comes_back(model):
    def own(x):
        return x

    model.first.forward = own
    before = model(X)
    with injected(model, [(model.first, lambda x: -x)]):
        assert not torch.equal(model(X), before)
    assert model.first.forward is own
    assert torch.equal(model(X), before)


def test_injecting_twice_is_an_error(model):
    injection = Injection(model, [(model.first, plus(1.0))]).inject()
    once = model(X)
    with pytest.raises(AdapterError, match="injected already"):
        injection.inject()
    assert torch.equal(model(X), once)
    injection.eject()
    with pytest.raises(AdapterError, match="not injected"):
        injection.eject()
    assert not injection.injected
    assert injection.inject().injected


def test_what_came_last_goes_first(model):
    before = model(X)
    under, over = (Injection(model, [(model.first, plus(x))]) for x in (1.0, 2.0))
    under.inject(), over.inject()
    both = model(X)
    with pytest.raises(AdapterError, match="over this"):
        under.eject()
    assert torch.equal(model(X), both)
    over.eject(), under.eject()
    assert untouched(model, before)


def test_an_exception_ejects(model):
    before = model(X)
    with pytest.raises(ZeroDivisionError), Injection(model, [(model.first, plus(1.0))]):
        raise ZeroDivisionError
    assert untouched(model, before)


def test_a_change_that_fails_halfway_is_undone(model):
    before = model(X)

    def burst(inner):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Injection(model, [(model.first, plus(1.0)), (model.second, burst)]).inject()
    assert untouched(model, before)


def ends_in_a_thread(work, seconds=20.0):
    """Whether some work ends while this thread goes on holding what it holds; it is waited for then."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_model_waits_for_no_other_model(model):
    other, ran = Model(), []

    def work():
        with Injection(other, [(other.first, plus(1.0))]):
            ran.append(other(X))

    with Injection(model, [(model.first, plus(1.0))]), exclusive(model):
        assert ends_in_a_thread(work) and len(ran) == 1


def test_one_model_is_used_by_one_thread_at_a_time(model):
    ran, free = [], Event()

    def work():
        with Injection(model, [(model.first, plus(1.0))]):
            ran.append(1)
        free.set()

    with exclusive(model), Injection(model, [(model.second, plus(1.0))]):
        assert not ends_in_a_thread(work, 0.2) and not ran
    assert free.wait(20.0) and ran == [1]


def test_a_lock_leaves_no_trace_in_its_owner(model):
    before, keys = set(vars(model)), list(model.state_dict())

    def work():
        with exclusive(twin):
            pass

    with exclusive(model):
        twin = deepcopy(model)
        assert set(vars(model)) == before and list(model.state_dict()) == keys
        assert ends_in_a_thread(work), "a copy has a lock of its own"
