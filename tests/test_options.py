import pytest

from vl_plugins.errors import UserError
from vl_plugins.options import REQUIRED, construct, constructor_options, format_options


class Base:
    def __init__(self, reducer=None):
        self.reducer = reducer


class Middle(Base):
    """Has no constructor of its own."""


class Mixin:
    def __init__(self, weight=1, *, power=2, **kwargs):
        super().__init__(**kwargs)


class Loss(Mixin, Middle):
    def __init__(self, size, margin=0.2, weight=3, **kwargs):
        super().__init__(weight=weight, **kwargs)
        if margin < 0:
            raise ValueError("margin must be >= 0")


class Closed(Loss):
    def __init__(self, margin=0.2):
        super().__init__(size=1, margin=margin)


class Sized:
    def __init__(self, size=None):
        if size is None:
            raise AssertionError("no size")
        if size == 0:
            raise AssertionError


def test_options_follow_the_keyword_arguments_along_the_bases():
    assert constructor_options(Loss) == {"size": REQUIRED, "margin": 0.2, "weight": 3, "power": 2, "reducer": None}
    assert constructor_options(Middle) == {"reducer": None}
    assert constructor_options(Closed) == {"margin": 0.2}
    assert constructor_options(lambda margin=0.2, *, scale=50: None) == {"margin": 0.2, "scale": 50}
    assert constructor_options(object) == {}


def test_construct():
    assert construct("loss", "mine", Loss, {"size": 1, "reducer": "mean"}).reducer == "mean"


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (
            Loss,
            {"size": 1, "margn": 0.1},
            "unknown option 'margn' of loss 'mine' (did you mean 'margin'?); "
            "options: size, margin=0.2, weight=3, power=2, reducer=None",
        ),
        (Base, {"zzz": 1}, "unknown option 'zzz' of loss 'mine'; options: reducer=None"),
        (
            Loss,
            {"margin": 0.1},
            "loss 'mine' refuses margin=0.1: Loss.__init__() missing 1 required positional argument: 'size'; "
            "options: size, margin=0.2, weight=3, power=2, reducer=None",
        ),
        (
            Sized,
            {},
            "loss 'mine' refuses to be made without options: no size; options: size=None",
        ),
        (Sized, {"size": 0}, "loss 'mine' refuses size=0: AssertionError; options: size=None"),
    ],
)
def test_wrong_options(factory, options, message):
    with pytest.raises(UserError) as raised:
        construct("loss", "mine", factory, options)
    assert str(raised.value) == message


def test_a_value_error_of_the_constructor_passes_through():
    with pytest.raises(ValueError, match="margin must be >= 0") as raised:
        construct("loss", "mine", Loss, {"size": 1, "margin": -1})
    assert not isinstance(raised.value, UserError)


def test_format_options():
    assert format_options({"weights": REQUIRED, "name": "a"}) == "weights, name='a'"
