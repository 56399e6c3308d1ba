import copy
import io
import math

import pytest
import torch

from tests.helpers.archives import encode_archive, encode_picture, read_archive
from tests.helpers.pages import NASTY, every, parse, picture_content, raw, text
from vl_plugins.data import read_collection
from vl_plugins.retrieval import report as report_module
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.metrics import metrics_table
from vl_plugins.retrieval.report import write_report

pillow = pytest.importorskip("PIL.Image")


def examples(page):
    """The examples of each group: of failures and successes, of images and captions."""
    return [every(group, "li", class_="example") for group in every(page, "details")]


@pytest.fixture(scope="module")
def collection(toy_shards):
    return read_collection(sorted(map(str, toy_shards.glob("toy-test-*.tar"))))


@pytest.fixture(scope="module")
def matrix(collection):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(len(collection), 8, generator=generator)
    captions = images[collection.image_of_caption]
    captions = captions + 2.5 * torch.randn(captions.shape, generator=generator)
    return torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(captions).T


@pytest.fixture(scope="module")
def ranks(collection, matrix):
    return similarity_ranks(matrix, collection.image_of_caption)


@pytest.fixture(scope="module")
def write(tmp_path_factory, ranks, collection):
    """Function that writes a report of the toy scenes, with other arguments where they are given."""

    def write_page(**changed):
        file = tmp_path_factory.mktemp("report") / "new" / "report.html"
        arguments = {"ranks": ranks, "title": "Toy scenes", "settings": {"model": "vl-tiny"}, "collection": collection}
        arguments |= changed
        arguments.setdefault("tables", [{"toy": retrieval_metrics(arguments["ranks"])}])
        write_report(file, **arguments)
        return file

    return write_page


@pytest.fixture(scope="module")
def report(write):
    return write(examples=200)


def test_each_kind_of_metrics_has_a_table(write):
    recalls = {f"{way}_R@{k}": k / 16 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    tables = [{"vit coco-5k": recalls | {"rsum": 200.0}, "a|b <i>": recalls}, {"vit eccv-caption": recalls}]
    page = parse(write(tables=tables))
    found = [[[text(cell) for cell in row] for row in every(table, "tr")] for table in every(page, "table")]
    assert found == [metrics_table(rows, bool(judged)) for judged, rows in enumerate(tables)]


def test_nothing_is_loaded_and_nothing_runs(report):
    page = parse(report)
    (policy,) = (meta.attrib["content"] for meta in every(page, "meta") if "http-equiv" in meta.attrib)
    assert policy.startswith("default-src 'none'; img-src data:;")
    sources = [value for element in every(page) for name, value in element.attrib.items() if name in ("src", "href")]
    assert {source.partition(";base64,")[0] for source in sources if not source.startswith("#picture-")} == {
        "data:image/jpeg",
        "data:image/svg+xml",
    }


def test_equal_arguments_give_equal_bytes(write, report):
    assert write(examples=200).read_bytes() == report.read_bytes()


def test_charts_show_similarities_and_recalls(write, matrix, ranks, collection, monkeypatch):
    figures, new_figure = [], report_module.new_figure
    monkeypatch.setattr(report_module, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    write()
    (histograms,), (curves,) = (figure.axes for figure in figures)
    negatives = matrix.clone()
    negatives[collection.image_of_caption, torch.arange(120)] = -math.inf
    values = [matrix[negatives.isinf()], negatives.amax(dim=1), negatives.amax(dim=0)]
    low, high = (bound.item() for bound in torch.cat(values).aminmax())
    for patch, numbers in zip(histograms.patches, values, strict=True):
        expected = torch.histc(numbers.double(), 50, low, high) / len(numbers) * 100
        assert patch.get_xy()[1:-1:2, 1] == pytest.approx(expected.tolist(), abs=1e-4)
    for line, part in zip(curves.lines, ranks, strict=True):
        recalls = dict(line.get_xydata().tolist())  # of several points with one K, the last
        assert recalls == pytest.approx({k: 100 * (part.rank <= k).double().mean().item() for k in recalls})


def test_failures_are_worst_first_and_successes_by_their_lead(write, collection):
    """Caption i is the right one of image i."""
    rows = [[0.1, 0.9, 0.8, 0.7], [0.3, 0.5, 0.6, 0.2], [0.1, 0.2, 0.9, 0.4], [0.0, 0.2, 0.3, 0.6]]
    some = collection.with_captions(torch.arange(4))
    page = parse(write(ranks=similarity_ranks(torch.tensor(rows), torch.arange(4)), collection=some))
    by_image, by_caption = [[(0, 4), (1, 2)], [(2, 1), (3, 1)]], [[(0, 3), (1, 2), (3, 2)], [(2, 1)]]
    assert [text(summary) for summary in every(page, "summary")] == [
        "Image to text: 2 of 2 failures",
        "Image to text: 2 of 2 successes",
        "Text to image: 3 of 3 failures",
        "Text to image: 1 of 1 successes",
    ]
    for group, queries in zip(examples(page)[:2], by_image, strict=True):
        for example, (query, rank) in zip(group, queries, strict=True):
            assert every(example[0], "svg")[0].attrib["aria-label"] == some.keys[query]
            assert text(example[0]) == f"rank {rank}, image {some.image_ids[query]}"
            order = sorted(range(4), key=lambda caption: -rows[query][caption])
            assert [text(item) for item in every(example[1], "li")] == [
                f"{place} {'✓' if caption == query else '✗'} {rows[query][caption]:.3f} {some.captions[caption]}"
                for place, caption in enumerate(order, 1)
            ]
    for group, queries in zip(examples(page)[2:], by_caption, strict=True):
        for example, (query, rank) in zip(group, queries, strict=True):
            assert text(example[0]) == f"{some.captions[query]} rank {rank}, caption {some.caption_ids[query]}"
    # Of equally similar images the wrong one comes first.
    answers = [
        (image.attrib["aria-label"], text(item))
        for item in every(examples(page)[2][0][1], "li")
        for image in every(item, "svg")
    ]
    assert answers == [
        (some.keys[1], "1 ✗ 0.300"),
        (some.keys[2], "2 ✗ 0.100"),
        (some.keys[0], "3 ✓ 0.100"),
        (some.keys[3], "4 ✗ 0.000"),
    ]


def test_examples_are_spread_over_all(write, report):
    whole, chosen = (
        [[text(example[0]) for example in group] for group in examples(parse(file))]
        for file in (report, write(examples=3))
    )
    for group, some in zip(whole, chosen, strict=True):
        assert [group.index(query) for query in some] == [0, round((len(group) - 1) / 2), len(group) - 1]


def test_damaged_and_wide_pictures(write, collection, tmp_path):
    contents = iter([b"no picture", encode_picture((500, 1))])
    members = read_archive(collection.shards[0]).items()
    changed = [(name, next(contents, content) if name.endswith(".png") else content) for name, content in members]
    shard = tmp_path / "toy-test-000000.tar"
    shard.write_bytes(encode_archive(changed))
    changed = read_collection([str(shard), *collection.shards[1:]])
    page = parse(write(collection=changed, examples=200))
    damaged, wide, *_ = collection.keys
    placeholder = next(node for node in every(page, "small") if text(node) == f"no picture of {damaged}")
    assert "not an image" in placeholder.attrib["title"]
    (*_, image) = every(page, "span", title=wide)
    assert every(image, "svg")[0].attrib["viewBox"] == "0 0 160 1"
    with pillow.open(io.BytesIO(picture_content(page, image))) as picture:
        assert picture.size == (160, 1)


def test_queries_may_be_few_and_without_wrong_candidates(write, collection):
    """As in ECCV Caption, where captions are queries of which others are candidates only."""
    answers = {0: [*range(6)], 1: [5], 2: [4]}, {3: [0, 1], 4: [1]}
    matrix = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], *[[0.6, 0.5, 0.4, 0.3, 0.2, 0.1]] * 2])
    page = parse(write(ranks=similarity_ranks(matrix, answers), collection=collection.with_captions(torch.arange(6))))
    numbers = [text(summary).rpartition(": ")[2] for summary in every(page, "summary")]
    assert numbers == ["2 of 2 failures", "1 of 1 successes", "1 of 1 failures", "1 of 1 successes"]
    facts = [[text(node) for node in every(group, "small")] for group in every(page, "details")]
    assert (facts[0][0], facts[0][6]) == (f"rank 6, image {collection.image_ids[1]}", "6 ✓ 0.100")
    assert [len(group) for group in facts] == [1 + 6 + 1 + 5, 1 + 5, 1 + 3, 1 + 3]
    assert facts[1] == [
        f"rank 1, image {collection.image_ids[0]}",
        *(f"{place} ✓ {similarity:.3f}" for place, similarity in enumerate((0.6, 0.5, 0.4, 0.3, 0.2), 1)),
    ]


@pytest.mark.filterwarnings("error")
def test_one_image_and_equal_similarities(write):
    """There is no negative, no range for a histogram, and without a collection no examples."""
    page = parse(write(ranks=similarity_ranks(torch.full((1, 2), 0.5), torch.tensor([0, 0])), collection=None))
    assert "Without the shards there are no pictures and captions" in text(page)
    assert len(every(page, "img")) == 2


def test_what_comes_from_outside_is_text(write, report, collection):
    """The page has the elements that it has with harmless captions, and holds the others as they are."""
    nasty = copy.copy(collection)
    for name in ("keys", "captions", "caption_ids", "image_ids"):
        vars(nasty)[name] = [f"{NASTY}{index}" for index in range(len(getattr(collection, name)))]
    nasty.pictures = collection.pictures  # which would notice the other keys
    metrics = retrieval_metrics(similarity_ranks(torch.eye(24), torch.arange(24)))
    changed = {"title": NASTY, "settings": {NASTY: "a\udcffb"}, "tables": [{NASTY: metrics}]}
    page = parse(write(collection=nasty, examples=200, **changed))
    assert [element.tag for element in every(page)] == [element.tag for element in every(parse(report))]
    names = [raw(every(page, tag)[0]) for tag in ("h1", "title", "dt", "tr[2]/th")]
    assert names == [NASTY] * 4
    assert raw(every(page, "dd")[0]) == "a?b"
    shown = [raw(node) for node in every(page, "*", dir="auto")]
    assert len(shown) > 100
    assert all(text.startswith(NASTY) for text in shown)
