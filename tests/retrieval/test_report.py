import base64
import hashlib
import io
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import zlib
from html.parser import HTMLParser

import pytest
import torch

import vl_plugins
from vl_plugins.data.collection import Collection, read_collection
from vl_plugins.retrieval import GroundTruth, retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.report import _evenly_spaced, _thumbnail, expected_recall, report_file, write_report
from vl_plugins.utils.errors import MissingExtraError, UserError

pytest.importorskip("matplotlib")
pillow = pytest.importorskip("PIL.Image")
pytest.importorskip("webdataset")

DIRECTIONS = ("image-to-text", "text-to-image")
VOID = {"br", "img", "input", "link", "meta"}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NASTY = "</script><script>document.title='x'</script><img src=x onerror=\"document.title='x'\"><!-- <b>&amp; \u2028 ünï"


class Node:
    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, attributes, []

    def all(self, tag=None, **attributes):
        """Elements below with these attributes, of which one is enough for a class; ``class_`` for ``class``."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if isinstance(child, Node):
                values = child.attributes
                if tag in (None, child.tag) and all(
                    value in (values.get(name) or "").split() if name == "class" else values.get(name) == value
                    for name, value in wanted.items()
                ):
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def one(self, tag=None, **attributes):
        (node,) = self.all(tag, **attributes)
        return node

    @property
    def raw(self):
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)

    @property
    def text(self):
        return " ".join(self.raw.split())


class Page(HTMLParser):
    """The elements of a page; an end tag that does not fit is an error."""

    def __init__(self, text):
        super().__init__()
        self.root = Node("root", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert len(self.open) == 1, f"{self.open[-1].tag} does not end"

    def handle_starttag(self, tag, attrs):
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> in {self.open[-1].tag}"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(file):
    return Page(file.read_text()).root


def cells(table):
    return [[cell.text for cell in row.all("th") + row.all("td")] for row in table.all("tr")]


def examples_data(page):
    return json.loads(page.one("script", id="examples-data").raw)


def similarities(collection, noise=2.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(len(collection.keys), 8, generator=generator)
    captions = images[collection.image_of_caption]
    captions = captions + noise * torch.randn(captions.shape, generator=generator)
    return torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(captions).T


def replaced(collection, **fields):
    return Collection(**{field: getattr(collection, field) for field in collection.__dataclass_fields__} | fields)


@pytest.fixture(scope="module")
def collection(toy_shards):
    return read_collection(sorted(map(str, toy_shards.glob("toy-test-*.tar"))))


@pytest.fixture(scope="module")
def matrix(collection):
    return similarities(collection)


@pytest.fixture(scope="module")
def ranks(collection, matrix):
    return similarity_ranks(matrix, collection.image_of_caption, negatives=5)


@pytest.fixture(scope="module")
def write(tmp_path_factory, ranks, collection):
    """Function that writes a report of the toy scenes, with other arguments where they are given."""

    def write_page(**changed):
        file = tmp_path_factory.mktemp("report") / "new" / "report.html"
        arguments = {"ranks": ranks, "title": "Toy scenes", "settings": {"model": "vl-tiny"}, "collection": collection}
        arguments |= changed
        arguments.setdefault("results", {"toy": retrieval_metrics(arguments["ranks"])})
        write_report(file, **arguments)
        return file

    return write_page


@pytest.fixture(scope="module")
def report(write):
    return write()


def reference(rows, right_answers):
    """By plain loops, for each query: its rank, its lead, its first five answers, and its best right answer."""
    found = []
    for row, right in zip(rows, right_answers, strict=True):
        best = max(right, key=lambda index: row[index])
        wrong = [index for index in range(len(row)) if index not in right]
        rank = 1 + sum(row[index] >= row[best] for index in wrong)
        answers = sorted(range(len(row)), key=lambda index: (-row[index], index in right))[:5]
        found.append((rank, row[best] - max(row[index] for index in wrong), answers, best))
    return found


def references(matrix, collection):
    image_of_caption = collection.image_of_caption.tolist()
    of_image = [
        {caption for caption, owner in enumerate(image_of_caption) if owner == image}
        for image in range(len(collection.keys))
    ]
    return {
        "image-to-text": (matrix.tolist(), of_image, reference(matrix.tolist(), of_image)),
        "text-to-image": (
            matrix.T.tolist(),
            [{image} for image in image_of_caption],
            reference(matrix.T.tolist(), [{image} for image in image_of_caption]),
        ),
    }


def test_path_is_checked_before_the_work(tmp_path, monkeypatch):
    assert report_file(str(tmp_path / "a.html")) == tmp_path / "a.html"
    with pytest.raises(UserError, match=r"must end in \.html, got .*a\.pdf"):
        report_file(tmp_path / "a.pdf")
    (tmp_path / "b.html").mkdir()
    with pytest.raises(UserError, match=r"must be a file, .*b\.html is a folder"):
        report_file(tmp_path / "b.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"vl_plugins\[eval\]"):
        report_file(tmp_path / "a.html")


def test_bad_arguments_are_named(write, collection, matrix, ranks):
    with pytest.raises(ValueError, match="results must hold at least one"):
        write(results={})
    with pytest.raises(ValueError, match="examples must be positive, got 0"):
        write(examples=0)
    few = similarity_ranks(matrix, collection.image_of_caption, negatives=4)
    with pytest.raises(ValueError, match="at least 5 negatives to show examples, got 4"):
        write(ranks=few)
    smaller = replaced(collection, captions=collection.captions[:-1])
    with pytest.raises(ValueError, match="24 images and 119 captions, got ranks of at least 24 and 120"):
        write(collection=smaller)


def test_the_numbers_are_a_table(write):
    metrics = {
        f"{direction}_{name}": value + shift
        for shift, direction in ((0, "image_to_text"), (50, "text_to_image"))
        for name, value in {"R@1": 1.04, "R@5": 5.06, "R@10": 10, "median_rank": 2.5, "mean_rank": 1234.56}.items()
    }
    rest = {"rsum": 182.2, "text_to_image_r_precision": 33.3, "positive_similarity": 0.5}
    page = parse(write(results={"coco-5k": metrics | rest, "a|b <i>": metrics, "eccv": {"rsum": float("nan")}}))
    table = cells(page.one("table", class_="numbers"))
    assert table[0] == ["evaluation", "Image to text", "Text to image", "Both"]
    columns = ["R@1", "R@5", "R@10", "median", "mean"]
    assert table[1] == [*columns, *columns, "R-Precision", "RSUM"]
    first = ["1.0", "5.1", "10.0", "2.5", "1234.6"]
    second = ["51.0", "55.1", "60.0", "52.5", "1284.6"]
    assert table[2] == ["coco-5k", *first, *second, "33.3", "182.2"]
    assert table[3] == ["a|b <i>", *first, *second, "–", "–"]
    assert table[4] == ["eccv", *["–"] * 12]
    widths = [
        int(cell.attributes["colspan"]) for cell in page.one("table", class_="numbers").all("th", class_="start")[:3]
    ]
    assert widths == [5, 6, 1]

    markdown, tabs = (
        button.attributes["data-copy"] for button in page.all("button") if "data-copy" in button.attributes
    )
    lines = markdown.splitlines()
    assert lines[0].startswith("|  | i2t R@1 | i2t R@5 |")
    assert lines[1] == "| --- |" + " ---: |" * 12
    assert lines[3].startswith(r"| a\|b <i> | 1.0 | 5.1 |")
    rows = [line.split("\t") for line in tabs.splitlines()]
    assert rows[1] == table[2]
    assert rows[3] == ["eccv", *[""] * 12]


def test_other_recalls_and_precisions_have_columns(write, ranks):
    page = parse(write(results={"toy": retrieval_metrics(ranks, recall_at=(1, 5, 10, 50))}, collection=None))
    columns = cells(page.one("table", class_="numbers"))[1]
    assert columns == [*["R@1", "R@5", "R@10", "R@50", "median", "mean", "mAP@R", "R-Precision"] * 2, "RSUM"]


def test_settings_are_shown_as_they_are(write):
    page = parse(write(settings={"model": "vl-tiny", "<b>": NASTY, "file": "a\udcffb"}, collection=None))
    names, values = ([element.raw for element in page.one("dl", class_="settings").all(tag)] for tag in ("dt", "dd"))
    assert names == ["queries", "model", "<b>", "file"]
    assert values == ["24 images, 120 captions", "vl-tiny", NASTY, "a?b"]


def test_nothing_is_loaded_and_no_other_script_can_run(report):
    page = parse(report)
    scripts = [script for script in page.all("script") if script.attributes.get("type") != "application/json"]
    assert len(scripts) == 1
    policy = page.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    digest = base64.b64encode(hashlib.sha256(scripts[0].raw.encode()).digest()).decode()
    assert set(policy.split("; ")) == {
        "default-src 'none'",
        "img-src data:",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    }
    elements = page.all()
    assert len(elements) > 300
    assert not {"link", "iframe", "object", "embed", "base"} & {element.tag for element in elements}
    for element in elements:
        for name, value in element.attributes.items():
            assert not name.startswith("on"), element.tag
            assert name not in ("src", "srcset", "data", "action", "background"), element.tag
            if name.endswith("href"):
                assert value.startswith("#")
            if not name.startswith("xmlns"):
                assert "http:" not in (value or ""), element.tag
                assert "https:" not in (value or ""), element.tag
    # One of matplotlib's would hold for the whole page.
    style = page.one("style").raw
    assert "@import" not in style
    assert "url(" not in style
    names = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(names) == len(set(names))


def test_equal_arguments_give_equal_bytes(write, report):
    assert write().read_bytes() == report.read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_expected_recall_equals_all_orders(seed):
    candidates = 5 + seed
    right_answers = torch.tensor([1, 2, 2, candidates])
    hits = torch.zeros(candidates, dtype=torch.float64)
    for order in itertools.permutations(range(candidates)):
        for number in right_answers.tolist():
            first = min(order.index(right) for right in range(number))
            hits[first:] += 1
    expected = hits / (len(right_answers) * math.factorial(candidates))
    torch.testing.assert_close(expected_recall(right_answers, candidates, torch.arange(1, candidates + 1)), expected)


def test_expected_recall_of_many_candidates():
    expected = [1 - math.comb(25000 - 5, k) / math.comb(25000, k) for k in (1, 10, 1000)]
    found = expected_recall(torch.full((7,), 5), 25000, torch.tensor([1, 10, 1000, 24996, 25000]))
    torch.testing.assert_close(found, torch.tensor([*expected, 1, 1], dtype=torch.float64), rtol=1e-6, atol=0)


def test_recalls_by_rank_stand_in_a_table_and_a_curve(report, matrix, collection):
    page = parse(report)
    table, curve = page.all("table")[1], page.one("svg", aria_label=re_label(page, "Recall@K"))
    found = [
        rank_of for *_, each in references(matrix, collection).values() for rank_of in [[rank for rank, *_ in each]]
    ]
    assert [row[0] for row in cells(table)[2:]] == ["1", "5", "10", "50", "100"]
    for row in cells(table)[2:]:
        k = int(row[0])
        for ranks, candidates, right, shown in zip(found, (120, 24), (5, 1), (row[1:3], row[3:5]), strict=True):
            if k > candidates:
                assert shown == ["–", "–"]
            else:
                assert shown[0] == f"{100 * sum(rank <= k for rank in ranks) / len(ranks):.1f}"
                chance = 100 * (1 - math.comb(candidates - right, k) / math.comb(candidates, k))
                assert shown[1] == f"{chance:.1f}"

    # Text to image has so few candidates that each of them is a point.
    points = [
        path_points(path)
        for path in curve.all("path")
        if "stroke: var(--fourth)" in path.attributes["style"] and "clip-path" in path.attributes
    ]
    chance, recall = points
    for line, expected in (
        (recall, [sum(rank <= k for rank in found[1]) / len(found[1]) for k in range(1, 25)]),
        (chance, [k / 24 for k in range(1, 25)]),
    ):
        assert len(line) == 24
        assert_affine([x for x, _ in line], [math.log(k) for k in range(1, 25)])
        assert_affine([y for _, y in line], expected)
    # Both on one scale.
    assert recall[-1] == chance[-1]


def re_label(page, beginning):
    (label,) = (
        svg.attributes["aria-label"]
        for svg in page.all("svg", class_="plot")
        if svg.attributes["aria-label"].startswith(beginning)
    )
    return label


def path_points(path):
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path.attributes["d"])]


def assert_affine(found, expected):
    """The numbers are a linear function of the expected ones."""
    found, expected = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found, expected))
    low, high = expected.argmin(), expected.argmax()
    scaled = (expected - expected[low]) / (expected[high] - expected[low])
    torch.testing.assert_close(found, found[low] + scaled * (found[high] - found[low]), rtol=0, atol=1e-3)


def test_histograms_count_similarities(report, matrix, collection):
    page = parse(report)
    pictures = [svg for svg in page.all("svg", class_="plot") if svg.attributes["aria-label"].startswith("Histograms")]
    drawn, values = [], []
    for svg, (rows, right_answers, _) in zip(pictures, references(matrix, collection).values(), strict=True):
        positive = [row[index] for row, right in zip(rows, right_answers, strict=True) for index in right]
        negative = [
            max(value for index, value in enumerate(row) if index not in right)
            for row, right in zip(rows, right_answers, strict=True)
        ]
        for numbers, colour in ((positive, "first"), (negative, "second")):
            outline = next(
                path
                for path in svg.all("path")
                if f"stroke: var(--{colour})" in path.attributes["style"] and "fill: none" in path.attributes["style"]
            )
            drawn.append(path_points(outline))
            values.append(numbers)
    low, high = (choose(itertools.chain(*values)) for choose in (min, max))
    shares, heights = [], []
    for points, numbers in zip(drawn, values, strict=True):
        # Up, along the first bin, up or down, along the second, ...
        tops = [y for (x, y), (next_x, _) in itertools.pairwise(points) if x != next_x]
        assert len(tops) == 50
        heights += [points[0][1] - y for y in tops]
        counts = [0] * 50
        for number in numbers:
            counts[min(int((number - low) / (high - low) * 50), 49)] += 1
        shares += [count / len(numbers) for count in counts]
    # Both directions on one scale.
    assert_affine(heights, shares)


def test_similarities_in_words(report, matrix, collection):
    page = parse(report)
    captions = [caption.text for caption in page.all("figcaption")[:2]]
    legends = [legend.text for legend in page.all("ul", class_="legend")[:2]]
    queries = ("24 images", "120 captions")
    for text, legend, of_queries, (_, _, found) in zip(
        captions, legends, queries, references(matrix, collection).values(), strict=True
    ):
        hits = sum(rank == 1 for rank, *_ in found)
        assert 0 < hits < len(found)
        assert text.startswith(f"For {hits} of {of_queries} ({100 * hits / len(found):.1f} percent) the best right")
        median = statistics.median(lead for _, lead, *_ in found)
        assert f"is {median:+.3f}.".replace("-", "−") in text
        right = matrix[collection.image_of_caption, torch.arange(120)].mean()
        assert f"right pairs, mean {right:.3f}" in legend


def test_examples_equal_plain_loops(report, matrix, collection):
    data = examples_data(parse(report))
    assert data["decimals"] == 3
    for direction, (rows, right_answers, found) in references(matrix, collection).items():
        shown = {}
        for outcome in ("failures", "successes"):
            group = data["groups"][f"{direction}/{outcome}"]
            queries = [query for query, (rank, *_) in enumerate(found) if (rank == 1) == (outcome == "successes")]
            assert group["altogether"] == len(queries) > 3
            assert len(group["examples"]) == min(len(queries), 60)
            shown |= {example["query"]: example for example in group["examples"]}
            if outcome == "successes":
                order = sorted(queries, key=[lead for _, lead, *_ in found].__getitem__)
            else:
                order = sorted(queries, key=[(rank, -lead) for rank, lead, *_ in found].__getitem__)
            if len(queries) <= 60:
                assert [example["query"] for example in group["examples"]] == order
        for query, example in shown.items():
            rank, lead, answers, best = found[query]
            assert example == {
                "query": query,
                "rank": rank,
                "rightAnswers": len(right_answers[query]),
                "lead": pytest.approx(lead, abs=6e-4),
                "best": [best, pytest.approx(rows[query][best], abs=6e-4)],
                "answers": [
                    [index, pytest.approx(rows[query][index], abs=6e-4), index in right_answers[query]]
                    for index in answers
                ],
            }
    used = {"images": set(), "captions": set()}
    for name, group in data["groups"].items():
        queries, candidates = ("images", "captions") if name.startswith("image") else ("captions", "images")
        for example in group["examples"]:
            used[queries].add(str(example["query"]))
            used[candidates] |= {str(index) for index, *_ in (example["best"], *example["answers"])}
    assert set(data["images"]) == used["images"]
    assert set(data["captions"]) == used["captions"]
    for index, image in data["images"].items():
        assert image["key"] == collection.keys[int(index)]
    for index, caption in data["captions"].items():
        assert caption == {"id": str(collection.caption_ids[int(index)]), "text": collection.captions[int(index)]}


@pytest.mark.parametrize(("length", "number"), [(0, 4), (3, 4), (4, 4), (5, 4), (25000, 60), (9, 1)])
def test_examples_are_spread_over_all(length, number):
    chosen = _evenly_spaced(torch.arange(length), number).tolist()
    assert len(chosen) == min(length, number)
    if number > 1 and length:
        assert (chosen[0], chosen[-1]) == (0, length - 1)
        gaps = {later - earlier for earlier, later in itertools.pairwise(chosen)}
        assert max(gaps) - min(gaps) <= 1
        assert min(gaps) >= 1


def test_pictures_are_those_of_the_shards(report, collection):
    data = examples_data(parse(report))
    files = collection.pictures(range(24))
    assert len(data["images"]) > 10
    for index, image in data["images"].items():
        assert image["picture"].startswith("data:image/jpeg;base64,")
        with (
            pillow.open(io.BytesIO(base64.b64decode(image["picture"].partition(",")[2]))) as shown,
            pillow.open(io.BytesIO(files[int(index)])) as original,
        ):
            assert shown.format == "JPEG"
            scale = min(1, 160 / max(original.size))
            assert shown.size == tuple(round(side * scale) for side in original.size)
            original = original.convert("RGB").resize((4, 4))
            differences = zip(shown.convert("RGB").resize((4, 4)).tobytes(), original.tobytes(), strict=True)
            assert max(abs(one - other) for one, other in differences) < 24


def encoded(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "MPO"])
def test_thumbnails_of_every_format_of_shards(format):
    with pillow.open(io.BytesIO(_thumbnail(encoded(pillow.new("RGB", (500, 1), (200, 30, 30)), format)))) as image:
        assert (image.format, image.size) == ("JPEG", (160, 1))


def test_transparency_becomes_white():
    data = encoded(pillow.new("RGBA", (20, 10), (0, 0, 0, 0)), "PNG")
    with pillow.open(io.BytesIO(_thumbnail(data))) as image:
        assert (image.size, image.getpixel((5, 5))) == ((20, 10), (255, 255, 255))


def bomb():
    """A small PNG file that says it has more pixels than pillow warns of, though less than it refuses."""
    data = bytearray(encoded(pillow.new("L", (1, 1)), "PNG"))
    data[16:24] = (11000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


PROBLEMS = {
    "not a picture": (b"GIF89a, no picture", "not an image"),
    "of another format": (encoded(pillow.new("RGB", (9, 9)), "GIF"), "not an image"),
    "cut": (encoded(pillow.effect_noise((200, 200), 90), "JPEG")[:900], "truncated"),
    "huge": (bomb(), "121000000 pixels"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_pictures_that_cannot_be_shown(problem):
    data, message = PROBLEMS[problem]
    with pytest.raises(UserError, match=message):
        _thumbnail(data)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, collection):
    """The collection with four pictures that cannot be decoded, in shards of their own."""
    folder = tmp_path_factory.mktemp("damaged")
    contents = iter([data for data, _ in PROBLEMS.values()])
    for shard in collection.shards:
        with tarfile.open(shard) as source, tarfile.open(folder / shard.rpartition("/")[2], "w") as target:
            for member in source:
                data = source.extractfile(member).read()
                if member.name.endswith(".png"):
                    data = next(contents, data)
                member.size = len(data)
                target.addfile(member, io.BytesIO(data))
    return read_collection(sorted(map(str, folder.glob("*.tar"))))


def test_damaged_pictures_are_no_crash(write, damaged):
    images = examples_data(parse(write(collection=damaged)))["images"]
    problems = {image["key"]: image["problem"] for image in images.values() if "problem" in image}
    assert set(problems) == set(damaged.keys[:4])
    assert all(problem.startswith("cannot be decoded: ") for problem in problems.values())
    assert sum("picture" in image for image in images.values()) == len(images) - 4


def test_a_lost_shard_leaves_the_old_report(tmp_path, collection, ranks):
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in collection.shards:
        shutil.copy(shard, shards)
    lost = read_collection(sorted(map(str, shards.glob("*.tar"))))
    (shards / lost.shards[1].rpartition("/")[2]).unlink()
    file = tmp_path / "out" / "report.html"
    file.parent.mkdir()
    file.write_text("old")
    with pytest.raises(UserError, match="cannot read the pictures of shard"):
        write_report(file, ranks, {"toy": {}}, title="t", settings={}, collection=lost)
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_without_a_collection_there_are_no_examples(write, collection, matrix):
    ranks = similarity_ranks(matrix.double(), collection.image_of_caption)
    page = parse(write(ranks=ranks, collection=None))
    assert not page.all("script", id="examples-data")
    assert not page.all("form")
    assert "no shards to take pictures and captions from" in page.one("section", id="examples").text
    assert cells(page.all("table")[1])[-1][:2] == ["100", "100.0"]


def test_queries_may_be_few_and_without_wrong_candidates(write, collection):
    """As in ECCV Caption, where captions are queries of which others are candidates only."""
    truth = GroundTruth.from_ids([0, 1], list(range(6)), {0: range(6), 1: [5]}, {3: [0, 1], 4: [1]})
    matrix = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]])
    ranks = similarity_ranks(matrix, truth, negatives=5)
    small = replaced(
        collection,
        captions=collection.captions[:6],
        caption_ids=collection.caption_ids[:6],
        image_of_caption=collection.image_of_caption[:6],
    )
    data = examples_data(parse(write(ranks=ranks, collection=small)))
    (success,) = data["groups"]["image-to-text/successes"]["examples"]
    assert (success["lead"], success["rightAnswers"], len(success["answers"])) == (None, 6, 5)
    (failure,) = data["groups"]["image-to-text/failures"]["examples"]
    assert (failure["query"], failure["rank"], failure["best"]) == (1, 6, [5, 0.1])
    both = [
        example["query"]
        for name in ("failures", "successes")
        for example in data["groups"][f"text-to-image/{name}"]["examples"]
    ]
    assert both == [4, 3]
    text = parse(write(ranks=ranks, collection=None)).text
    assert "For 1 of 2 images (50.0 percent)" in text
    assert "For 1 of 2 captions (50.0 percent)" in text


def test_one_image_has_no_wrong_candidates(write):
    ranks = similarity_ranks(torch.tensor([[0.5, 0.25]]), torch.tensor([0, 0]))
    page = parse(write(ranks=ranks, collection=None))
    captions = [caption.text for caption in page.all("figcaption")[:2]]
    assert captions[0].startswith("For 1 of 1 images (100.0 percent)")
    assert captions[1].startswith("For 2 of 2 captions (100.0 percent)")
    assert not any("median" in caption for caption in captions)
    legends = [legend.text for legend in page.all("ul", class_="legend")[:2]]
    assert legends == ["right pairs, mean 0.375 hardest negative of each query, mean –"] * 2
    assert cells(page.all("table")[1])[2:] == [["1", "100.0", "100.0", "100.0", "100.0"]]


def test_similarities_that_are_all_equal(write, collection):
    ranks = similarity_ranks(torch.zeros(24, 120), collection.image_of_caption, negatives=5)
    data = examples_data(parse(write(ranks=ranks)))
    assert data["groups"]["image-to-text/successes"] == {"altogether": 0, "examples": []}
    assert data["groups"]["image-to-text/failures"]["examples"][0]["rank"] == 116


@pytest.mark.parametrize(("scale", "decimals"), [(1, 3), (0.01, 5), (100, 1), (1e6, 0)])
def test_similarities_have_as_many_digits_as_they_need(write, collection, matrix, scale, decimals):
    ranks = similarity_ranks(scale * matrix, collection.image_of_caption, negatives=5)
    assert examples_data(parse(write(ranks=ranks, examples=1)))["decimals"] == decimals


@pytest.fixture(scope="module")
def nasty(collection, write):
    changed = replaced(
        collection,
        captions=tuple(f"{NASTY}{index}" for index in range(len(collection.captions))),
        caption_ids=tuple(f"{NASTY}{index}" for index in range(len(collection.captions))),
        image_ids=tuple(f"{NASTY}{index}" for index in range(len(collection.keys))),
    )
    return write(collection=changed, title=NASTY, settings={NASTY: NASTY})


def test_what_comes_from_shards_is_text(nasty, report):
    """The page has the elements that it has with harmless captions, and holds the others as they are."""
    page, harmless = parse(nasty), parse(report)
    assert [element.tag for element in page.all()] == [element.tag for element in harmless.all()]
    assert page.one("h1").raw == page.one("title").raw == NASTY
    data = examples_data(page)
    assert {caption["text"] for caption in data["captions"].values()} == {
        f"{NASTY}{index}" for index in data["captions"]
    }
    source = page.one("script", id="examples-data").raw
    assert "<" not in source
    assert ">" not in source
    assert nasty.read_text().count("<img") == 0


@pytest.fixture(scope="session")
def browse(tmp_path_factory):
    """Function that opens a page in a browser and returns its elements after its scripts have run."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        pytest.skip("no Chromium or Chrome is installed")
    profile = tmp_path_factory.mktemp("profile")

    def browse_page(file, address="", script=None, flags=()):
        if script is not None:
            # The page itself lets no other script run.
            text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text(), count=1)
            script = f"document.body.dataset.result = JSON.stringify((() => {{{script}}})());"
            file = tmp_path_factory.mktemp("driven") / "report.html"
            file.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
        command += ["--enable-logging=stderr", *flags, "--dump-dom", f"{file.as_uri()}{address}"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr
        assert "CONSOLE" not in finished.stderr, finished.stderr
        page = Page(finished.stdout).root
        return page if script is None else json.loads(page.one("body").attributes["data-result"])

    return browse_page


def test_the_browser_reports_errors_of_scripts(browse, report):
    """Else no test below could fail by them."""
    with pytest.raises(AssertionError, match="CONSOLE"):
        browse(report, script="missing.function()")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_examples_are_rendered(browse, report, collection, matrix, direction):
    page = browse(report, f"#{direction}/failures")
    rows, right_answers, found = references(matrix, collection)[direction]
    failures = sorted((query for query in range(len(rows)) if found[query][0] > 1), key=lambda q: found[q][:2])
    data = examples_data(page)["groups"][f"{direction}/failures"]["examples"]
    shown = page.one(id="examples-list").all("li", class_="example")
    assert len(shown) == min(12, len(failures))
    for node, example in zip(shown, reversed(data), strict=False):
        rank, _, answers, best = found[example["query"]]
        assert f"Rank {rank} of {len(rows[0])}" in node.one("div", class_="query").text
        listed = node.all("li", class_="answer")
        expected = [(place, index) for place, index in enumerate(answers, 1)]
        if best not in answers:
            expected.append((rank, best))
        assert len(listed) == len(expected)
        for item, (place, index) in zip(listed, expected, strict=True):
            right = index in right_answers[example["query"]]
            sign = "✓right" if right else "✗wrong"
            number = f"{rows[example['query']][index]:.3f}".replace("-", "−")
            assert item.one("span", class_="facts").text == f"{place}{sign}{number}"
            if direction == "image-to-text":
                assert item.one("span", class_="caption").text == collection.captions[index]
            else:
                assert item.one("img").attributes["alt"] == f"Image {collection.keys[index]}"
        if direction == "image-to-text":
            assert node.one("div", class_="query").one("img").attributes["src"].startswith("data:image/jpeg")
        else:
            assert node.one("p", class_="caption").text == collection.captions[example["query"]]
    assert any(found[example["query"]][3] not in found[example["query"]][2] for example in data[-12:])


def test_filters_and_pages_work(browse, report, matrix, collection):
    found = references(matrix, collection)
    failures = sum(rank > 1 for rank, *_ in found["text-to-image"][2])
    pages = math.ceil(min(failures, 60) / 12)
    assert pages > 2
    script = """
        const seen = [];
        const look = () => seen.push([
            document.getElementById("status").textContent, location.hash,
            document.querySelector(".pager .page").textContent,
            [...document.querySelectorAll("#examples-list .result")].map((node) => node.textContent)
                .filter((text) => text.startsWith("Rank")).map((text) => Number(text.split(" ")[1])),
        ]);
        const click = (selector) => { document.querySelector(selector).click(); look(); };
        look();
        click("input[value=text-to-image]");
        click(".above button[value='1']");
        click(".below button[value='1']");
        click(".below button[value='-1']");
        click("input[value=near]");
        const first = document.querySelector("#examples-list li");
        click(".above button[value='-1']");
        seen.push(first === document.querySelector("#examples-list li"));
        click("input[value=successes]");
        return seen;
    """
    seen = browse(report, script=script)
    assert seen.pop(7), "a button that is disabled has changed the list"
    total = min(failures, 60)
    assert seen[0][0].startswith("Image to text, failures 1 to ")
    assert seen[0][1] == ""
    name = "Text to image, failures"
    assert [status for status, *_ in seen[1:7]] == [
        f"{name} {first} to {first + 11} of {total} shown" for first in (1, 13, 25, 13, 1, 1)
    ]
    beginning = "#text-to-image/failures/far"
    assert [address for _, address, *_ in seen[1:5]] == [
        beginning,
        f"{beginning}/2",
        f"{beginning}/3",
        f"{beginning}/2",
    ]
    assert seen[2][2] == f"Page 2 of {pages}"
    assert seen[5][1] == seen[6][1] == "#text-to-image/failures/near"
    assert seen[7][1] == "#text-to-image/successes/near"
    worst, nearest = seen[1][3], seen[5][3]
    assert worst == sorted(worst, reverse=True)
    assert worst[0] == max(rank for rank, *_ in found["text-to-image"][2])
    assert nearest == sorted(nearest)
    assert nearest[0] == min(rank for rank, *_ in found["text-to-image"][2] if rank > 1)
    assert set(seen[7][3]) == {1}


def test_address_chooses_what_is_shown(browse, report):
    """Also one that changes while the page is open, and one that makes no sense."""
    script = """
        const text = (selector) => document.querySelector(selector).textContent;
        const seen = [text("#status"), text(".pager .page")];
        for (const address of ["#%22/../constructor/0", "#text-to-image/2"]) {
            location.hash = address;
            // The event itself comes after this script has ended.
            dispatchEvent(new Event("hashchange"));
            seen.push(text("#status"));
        }
        return seen;
    """
    first, page, second, third = browse(report, "#successes/text-to-image/near/99", script=script)
    data = examples_data(parse(report))
    successes = len(data["groups"]["text-to-image/successes"]["examples"])
    pages = math.ceil(successes / 12)
    assert pages > 1
    assert first == f"Text to image, successes {12 * pages - 11} to {successes} of {successes} shown"
    assert page == f"Page {pages} of {pages}"
    assert second.startswith("Image to text, failures 1 to ")
    assert third.startswith("Text to image, failures 13 to 24 ")


def test_captions_are_never_run(browse, nasty):
    """Nor would they be without the policy, which a page with one more script does not have."""
    script = """
        return {
            captions: [...document.querySelectorAll("#examples-list p.caption")].map((node) => node.textContent),
            pictures: [...document.images].map((image) => image.src.slice(0, 23)),
            title: document.title,
            scripts: document.scripts.length,
        };
    """
    found = browse(nasty, "#text-to-image/failures", script=script)
    assert len(found["captions"]) == 12
    assert all(caption.startswith(NASTY) for caption in found["captions"])
    assert set(found["pictures"]) == {"data:image/jpeg;base64,"}
    assert (found["title"], found["scripts"]) == (NASTY, 3)


def test_placeholders_have_the_key(browse, write, damaged):
    ranks = similarity_ranks(-similarities(damaged, noise=0.0), damaged.image_of_caption, negatives=5)
    page = browse(write(ranks=ranks, collection=damaged), "#image-to-text/failures")
    missing = page.one(id="examples-list").all("span", class_="missing")
    assert missing
    for node in missing:
        assert node.one("span", class_="key").text in damaged.keys[:4]


def test_without_javascript_there_are_no_empty_controls(report):
    page = parse(report)
    assert "needs JavaScript" in page.one("noscript").text
    controls = [node for node in page.all() if "data-needs-script" in node.attributes]
    assert len(controls) == 2
    assert all("hidden" in node.attributes for node in controls)
    assert sum(len(node.all("button")) + len(node.all("input")) for node in controls) == len(
        page.all("button") + page.all("input")
    )


def test_a_narrow_window_does_not_scroll_sideways(browse, report):
    script = """
        document.querySelector("input[value=text-to-image]").click();
        return [document.documentElement.scrollWidth, innerWidth];
    """
    width, window = browse(report, script=script, flags=["--window-size=360,800"])
    assert width <= window <= 500


@pytest.mark.slow
def test_the_template_is_in_the_wheel(install):
    site = install(".")
    assert (site / "vl_plugins" / "retrieval" / "report.html.jinja").is_file()
    code = """
import torch
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks
from vl_plugins.retrieval.report import write_report, __file__ as file
ranks = retrieval_ranks(torch.eye(4), torch.eye(4), torch.arange(4))
write_report("report.html", ranks, {"a": retrieval_metrics(ranks)}, title="t", settings={})
print(file)
"""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(str(site))
    assert vl_plugins.__version__ in parse(site / "report.html").one("footer").text
