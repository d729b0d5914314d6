import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_helpers import expanded

from redcoast.sharding.report._text import braced, percentages, scaled, shortened

names = st.lists(st.sampled_from(["w1", "w2", "bias", "10", "2", "a_b"]), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(paths=st.lists(names.map("/".join), max_size=30))
def test_patterns_stand_for_exactly_their_paths(paths):
    actual = braced(paths)
    places = [place for _, some in actual for place in some]
    assert sorted(places) == list(range(len(paths)))
    for pattern, some in actual:
        assert sorted(expanded(pattern)) == sorted({paths[place] for place in some})


@pytest.mark.parametrize(
    ("paths", "patterns"),
    [
        ([f"layers/{i}/{w}" for i in range(12) for w in "kq"], ["layers/{0..11}/{k,q}"]),
        (["a/0", "a/2", "a/4", "b"], ["a/{0..4..2}", "b"]),
        (["a/0", "a/1", "a/5"], ["a/{0..1,5}"]),
        (["down/0/norm2", "down/1/norm1"], ["down/0/norm2", "down/1/norm1"]),
        (["w", "w1", "w01"], ["w", "w1", "w01"]),
        (["w/²", "w/b"], ["w/{²,b}"]),  # a digit that is no decimal
        ([""], [""]),
    ],
)
def test_patterns(paths, patterns):
    assert [pattern for pattern, _ in braced(paths)] == patterns


def test_many_paths_are_shortened_and_the_others_counted():
    paths = ["a/0", "b/x/0", "b/x/1", "c/y/z"]
    assert shortened(paths, limit=2) == "a/0, b/x/{0..1} and 1 more"
    assert shortened(paths, limit=3, width=5) == "a/0 and 3 more"
    assert shortened(paths) == "a/0, b/x/{0..1}, c/y/z"


@given(sizes=st.lists(st.integers(0, 10**12), min_size=1, max_size=5).filter(any))
def test_percentages_add_up_and_are_close(sizes):
    actual = percentages(sizes)
    assert sum(actual) == 100
    assert all(abs(a - 100 * b / sum(sizes)) < 1 for a, b in zip(actual, sizes, strict=True))


def test_sizes_have_three_digits_and_a_unit():
    sizes = (0, 999, 999.9, 93_480, 999_999, 26_960_000_000, 80e9, 3.2e12)
    shown = ("0 bytes", "999 bytes", "1 kB", "93.5 kB", "1 MB", "27 GB", "80 GB", "3.2 TB")
    assert tuple(map(scaled, sizes)) == shown
