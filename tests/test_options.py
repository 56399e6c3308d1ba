import pytest

from vl_plugins.options import REQUIRED, construct, constructor_options, format_options
from vl_plugins.utils.errors import UserError


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


class Holder(Loss):
    """Its further options are those of what it holds."""

    def __init__(self, held="closed", weight=5, **held_options):
        self.held = {"closed": Closed, "base": Base}[held](**held_options)

    @classmethod
    def forwarded_options(cls, given):
        return constructor_options({"closed": Closed, "base": Base}[given.get("held", "closed")]) | {"weight": 7}


class ClosedHolder(Holder):
    def __init__(self, size=1):
        super().__init__()


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


def test_options_that_are_forwarded_to_something_else_depend_on_those_given():
    assert list(constructor_options(Holder).items()) == [("held", "closed"), ("weight", 5), ("margin", 0.2)]
    assert constructor_options(Holder, {"held": "base"}) == {"held": "closed", "weight": 5, "reducer": None}
    assert constructor_options(ClosedHolder) == {"size": 1}
    with_other_options = constructor_options(
        type("Derived", (Holder,), {"__init__": lambda self, size, **kwargs: None})
    )
    assert with_other_options == {"size": REQUIRED, "held": "closed", "weight": 5, "margin": 0.2}


def test_construct():
    assert construct("loss", "mine", Loss, {"size": 1, "reducer": "mean"}).reducer == "mean"
    assert construct("loss", "mine", Holder, {"held": "base", "reducer": "mean"}).held.reducer == "mean"


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
            Holder,
            {"held": "base", "reduce": 1},
            "unknown option 'reduce' of loss 'mine' (did you mean 'reducer'?); "
            "options: held='closed', weight=5, reducer=None",
        ),
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
