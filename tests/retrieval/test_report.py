import base64
import copy
import io
import math
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from xml.etree import ElementTree

import pytest
import torch

from vl_plugins.data import read_collection
from vl_plugins.errors import MissingExtraError, UserError
from vl_plugins.retrieval import GroundTruth, retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.queries import Answers
from vl_plugins.retrieval.report import report_file, write_report

pillow = pytest.importorskip("PIL.Image")
pytest.importorskip("webdataset")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NASTY = "</p><script>document.title='x'</script><img src=x onerror=\"document.title='x'\"><!-- <b>&amp; \u2028 ünï"


def parse(file):
    """The elements of a page, which is well-formed XML too."""
    return ElementTree.fromstring(file.read_text())


def every(node, tag="*", **attributes):
    """The elements below with these attributes; ``class_`` for ``class``."""
    return node.findall(f".//{tag}" + "".join(f"[@{name.strip('_')}='{value}']" for name, value in attributes.items()))


def one(node, tag="*", **attributes):
    (found,) = every(node, tag, **attributes)
    return found


def raw(node):
    return "".join(node.itertext())


def text(node):
    return " ".join(raw(node).split())


def cells(page):
    return [[text(cell) for cell in row] for row in every(one(page, "table"), "tr")]


def points(line):
    """The points of a line of a chart, in [0, 1]."""
    pairs = [pair.split(",") for pair in line.attrib["points"].split()]
    return [((float(x) - 60) / 530, (260 - float(y)) / 240) for x, y in pairs]


@pytest.fixture(scope="module")
def collection(toy_shards):
    return read_collection(sorted(map(str, toy_shards.glob("toy-test-*.tar"))))


@pytest.fixture(scope="module")
def matrix(collection):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(len(collection.keys), 8, generator=generator)
    captions = images[collection.image_of_caption]
    captions = captions + 2.5 * torch.randn(captions.shape, generator=generator)
    return torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(captions).T


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
    return write(examples=200)


def references(matrix, collection):
    """By plain loops, for each direction and query: its rank, its lead, and its answers as (place, index, is right)."""
    owners = collection.image_of_caption.tolist()
    right_captions = [{caption for caption, owner in enumerate(owners) if owner == image} for image in range(24)]
    found = {}
    for direction, rows, right_answers in (
        ("Image to text", matrix.tolist(), right_captions),
        ("Text to image", matrix.T.tolist(), [{image} for image in owners]),
    ):
        found[direction] = []
        for row, right in zip(rows, right_answers, strict=True):
            best = max(right, key=lambda index: row[index])
            wrong = [index for index in range(len(row)) if index not in right]
            rank = 1 + sum(row[index] >= row[best] for index in wrong)
            order = sorted(range(len(row)), key=lambda index: (-row[index], index in right))[:5]
            answers = [(place, index, index in right) for place, index in enumerate(order, 1)]
            if best not in order:
                answers.append((rank, best, True))
            found[direction].append((rank, row[best] - max(row[index] for index in wrong), answers))
    return found


def test_path_is_checked_before_the_work(tmp_path, monkeypatch):
    assert report_file(str(tmp_path / "a.html")) == tmp_path / "a.html"
    with pytest.raises(UserError, match=r"must end in \.html, got .*a\.pdf"):
        report_file(tmp_path / "a.pdf")
    (tmp_path / "b.html").mkdir()
    with pytest.raises(UserError, match=r"must be a file, .*b\.html is a folder"):
        report_file(tmp_path / "b.html")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"vl_plugins\[data\]"):
        report_file(tmp_path / "a.html")


def test_bad_arguments_are_named(write, collection, matrix):
    with pytest.raises(ValueError, match="results must hold at least one"):
        write(results={})
    with pytest.raises(ValueError, match="examples must be positive, got 0"):
        write(examples=0)
    few = similarity_ranks(matrix, collection.image_of_caption, negatives=4)
    with pytest.raises(ValueError, match="at least 5 negatives to show examples, got 4"):
        write(ranks=few)


def test_the_numbers_are_a_table(write):
    metrics = {
        f"{direction}_{name}": value + shift
        for shift, direction in ((0, "image_to_text"), (50, "text_to_image"))
        for name, value in {"mean_rank": 1234.56, "median_rank": 2.5, "R@1": 1.04, "R@5": 5.06, "R@10": 10}.items()
    }
    rest = {"rsum": 182.2, "text_to_image_r_precision": 33.3, "positive_similarity": 0.5}
    results = {"vit coco-5k": metrics | rest, "a|b <i>": metrics, "eccv": {"rsum": float("nan")}}
    page = parse(write(results=results, paths={"vit coco-5k": "logs/<vit>/epoch_1.pt"}))
    columns = ["R@1", "R@5", "R@10", "median", "mean"]
    first, second = ["1.0", "5.1", "10.0", "2.5", "1234.6"], ["51.0", "55.1", "60.0", "52.5", "1284.6"]
    assert cells(page) == [
        ["", "", "Image to text", "Text to image"],
        ["run", "RSUM", *columns, *columns, "R-P"],
        ["vit coco-5k", "182.2", *first, *second, "33.3"],
        ["a|b <i>", "–", *first, *second, "–"],
        ["eccv", *["–"] * 12],
    ]
    widths = [cell.attrib["colspan"] for cell in every(page, "th", scope="colgroup")]
    assert widths == ["5", "6"]
    assert every(page, "th", scope="row")[0].attrib["title"] == "logs/<vit>/epoch_1.pt"


def test_nothing_is_loaded_and_nothing_runs(report):
    page = parse(report)
    (policy,) = (meta.attrib["content"] for meta in every(page, "meta") if "http-equiv" in meta.attrib)
    assert "default-src 'none'; img-src data:;" in policy
    elements = every(page)
    assert len(elements) > 1000
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {element.tag for element in elements}
    for element in elements:
        for name, value in element.attrib.items():
            assert not name.startswith("on"), element.tag
            assert name not in ("href", "srcset", "action", "background"), element.tag
            assert name != "src" or value.startswith("data:image/jpeg;base64,")
    style = raw(one(page, "style"))
    assert "@import" not in style
    assert "url(" not in style
    assert "prefers-color-scheme: dark" in style


def test_equal_arguments_give_equal_bytes(write, report):
    assert write(examples=200).read_bytes() == report.read_bytes()


def test_recalls_by_rank_are_a_curve(report, matrix, collection):
    lines = every(every(parse(report), "svg")[1], "polyline")
    found = references(matrix, collection)
    last = max(rank for queries in found.values() for rank, *_ in queries)
    for line, queries in zip(lines, found.values(), strict=True):
        curve = points(line)
        assert len(curve) == last
        for k, (x, y) in enumerate(curve, 1):
            assert x == pytest.approx(math.log(k) / math.log(last), abs=1e-3)
            assert y == pytest.approx(sum(rank <= k for rank, *_ in queries) / len(queries), abs=1e-3)


def test_histograms_count_similarities(report, matrix, collection):
    right = torch.zeros_like(matrix, dtype=torch.bool)
    right[collection.image_of_caption, torch.arange(120)] = True
    negatives = matrix.masked_fill(right, -math.inf)
    values = [matrix[right], negatives.amax(dim=1), negatives.amax(dim=0)]
    low, high = (choose(part for each in values for part in each.tolist()) for choose in (min, max))
    shares = []
    for numbers in values:
        counts = [0] * 50
        for number in numbers.tolist():
            counts[min(int((number - low) / (high - low) * 50), 49)] += 1
        shares.append([count / len(numbers) for count in counts])
    chart = every(parse(report), "figure")[0]
    for line, share in zip(every(chart, "polyline"), shares, strict=True):
        drawn = points(line)
        assert [x for x, _ in drawn[1::2]] == pytest.approx([edge / 50 for edge in range(1, 51)], abs=1e-3)
        assert [y for _, y in drawn[::2]] == [y for _, y in drawn[1::2]]
        assert [y for _, y in drawn[::2]] == pytest.approx([y / max(map(max, shares)) for y in share], abs=1e-3)
    means = [f"mean {numbers.mean():.3f}" for numbers in values]
    assert [text(item).rpartition(", ")[2] for item in every(chart, "li")] == means


def test_examples_equal_plain_loops(report, matrix, collection):
    groups = every(parse(report), "details")
    headings = []
    for direction, queries in references(matrix, collection).items():
        order = sorted(range(len(queries)), key=lambda query: (queries[query][0], -queries[query][1]))
        successes = [query for query in order if queries[query][0] == 1]
        failures = [query for query in reversed(order) if queries[query][0] > 1]
        for outcome, shown in (("failures", failures), ("successes", successes)):
            assert len(shown) > 3
            headings.append(f"{direction}: {len(shown)} of {len(shown)} {outcome}")
            examples = every(groups[len(headings) - 1], "li", class_="example")
            for example, query in zip(examples, shown, strict=True):
                assert_example(example, direction, query, queries[query], matrix, collection)
    assert [text(one(group, "summary")) for group in groups] == headings


def assert_example(example, direction, query, expected, matrix, collection):
    rank, _, answers = expected
    is_image = direction == "Image to text"
    head, listed = example[0], every(one(example, "ol"), "li")
    if is_image:
        assert one(head, "img").attrib["title"] == collection.keys[query]
        assert text(head) == f"rank {rank}, image {collection.image_ids[query]}"
    else:
        assert text(head) == f"{collection.captions[query]} rank {rank}, caption {collection.caption_ids[query]}"
    for item, (place, index, right) in zip(listed, answers, strict=True):
        similarity = matrix[query, index] if is_image else matrix[index, query]
        assert text(one(item, "span", class_="facts")) == f"{place} {'✓' if right else '✗'} {similarity:.3f}"
        if is_image:
            assert text(one(item, "span", dir="auto")) == collection.captions[index]
        else:
            assert one(item, "img").attrib["title"] == collection.keys[index]


def test_examples_are_spread_over_all(write, report):
    whole, chosen = (
        [
            [text(example[0]) for example in every(group, "li", class_="example")]
            for group in every(parse(file), "details")
        ]
        for file in (report, write(examples=3))
    )
    for group, some in zip(whole, chosen, strict=True):
        assert [group.index(query) for query in some] == [0, round((len(group) - 1) / 2), len(group) - 1]


def test_pictures_are_those_of_the_shards(report, collection):
    files = collection.pictures(range(24))
    shown = {image.attrib["title"]: image.attrib["src"] for image in every(parse(report), "img")}
    assert set(shown) == set(collection.keys)
    for index, key in enumerate(collection.keys):
        with (
            pillow.open(io.BytesIO(base64.b64decode(shown[key].partition(",")[2]))) as thumbnail,
            pillow.open(io.BytesIO(files[index])) as original,
        ):
            assert thumbnail.format == "JPEG"
            scale = min(1, 160 / max(original.size))
            assert thumbnail.size == tuple(round(side * scale) for side in original.size)
            pixels = [picture.convert("RGB").resize((4, 4)).tobytes() for picture in (thumbnail, original)]
            assert max(abs(one - other) for one, other in zip(*pixels, strict=True)) < 24


def encoded(image, format):
    stream = io.BytesIO()
    image.save(stream, format)
    return stream.getvalue()


def bomb():
    """A small PNG file that claims more pixels than pillow warns of."""
    data = bytearray(encoded(pillow.new("L", (1, 1)), "PNG"))
    data[16:24] = (11000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def test_pictures_of_every_kind(write, collection, tmp_path):
    """Damaged, disguised and huge ones are placeholders; a transparent one is on white."""
    contents = {
        "no picture": (b"GIF89a, no picture", "not an image"),
        "another format": (encoded(pillow.new("RGB", (9, 9)), "GIF"), "the format GIF is not supported"),
        "cut off": (encoded(pillow.effect_noise((200, 200), 90), "JPEG")[:900], "truncated"),
        "huge": (bomb(), "more than 89,478,485 pixels"),
        "wide": (encoded(pillow.new("RGB", (500, 1)), "WEBP"), (160, 1)),
        "transparent": (encoded(pillow.new("RGBA", (20, 10), (0, 0, 0, 0)), "PNG"), (20, 10)),
    }
    shard = tmp_path / "toy-test-000000.tar"
    with tarfile.open(collection.shards[0]) as source, tarfile.open(shard, "w") as target:
        data = iter([data for data, _ in contents.values()])
        for member in source:
            content = next(data, None) if member.name.endswith(".png") else None
            content = source.extractfile(member).read() if content is None else content
            member.size = len(content)
            target.addfile(member, io.BytesIO(content))
    changed = read_collection([str(shard), *collection.shards[1:]])
    page = parse(write(collection=changed, examples=200))
    for key, (_, expected) in zip(collection.keys, contents.values(), strict=False):
        if isinstance(expected, str):
            placeholder = next(node for node in every(page, "span", class_="thumbnail") if text(node).endswith(key))
            assert expected in placeholder.attrib["title"]
        else:
            source = every(page, "img", title=key)[0].attrib["src"]
            with pillow.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
                assert image.size == expected
                corner = image.getpixel((0, 0))
    assert corner == (255, 255, 255)


def test_a_lost_shard_leaves_the_old_report(tmp_path, toy_shards, ranks):
    shutil.copytree(toy_shards, tmp_path, dirs_exist_ok=True)
    lost = read_collection(f"{tmp_path}/toy-test-{{000000..000002}}.tar")
    (tmp_path / "toy-test-000001.tar").unlink()
    file = tmp_path / "out" / "report.html"
    file.parent.mkdir()
    file.write_text("old")
    with pytest.raises(UserError, match=r"cannot read .*toy-test-000001\.tar: No such file"):
        write_report(file, ranks, {"toy": {}}, title="t", settings={}, collection=lost)
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_queries_may_be_few_and_without_wrong_candidates(write, collection):
    """As in ECCV Caption, where captions are queries of which others are candidates only."""
    truth = GroundTruth.from_ids([0, 1], list(range(6)), {0: range(6), 1: [5]}, {3: [0, 1], 4: [1]})
    matrix = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]])
    ranks = similarity_ranks(matrix, truth, negatives=5)
    page = parse(write(ranks=ranks, collection=collection.with_captions(torch.arange(6))))
    counts = [text(one(group, "summary")).rpartition(": ")[2] for group in every(page, "details")]
    assert counts == ["1 of 1 failures", "1 of 1 successes"] * 2
    facts = [[text(node) for node in every(group, "span", class_="facts")] for group in every(page, "details")]
    assert facts[0][0] == f"rank 6, image {collection.image_ids[1]}"
    assert facts[0][-1] == "6 ✓ 0.100"
    assert facts[1] == [
        f"rank 1, image {collection.image_ids[0]}",
        *(f"{place} ✓ {similarity:.3f}" for place, similarity in enumerate((0.6, 0.5, 0.4, 0.3, 0.2), 1)),
    ]


@pytest.mark.filterwarnings("error")
def test_one_image_and_equal_similarities(write):
    """There is no negative, no range for a histogram, and without a collection no examples."""
    page = parse(write(ranks=similarity_ranks(torch.full((1, 2), 0.5), torch.tensor([0, 0])), collection=None))
    legend = [text(item) for item in every(every(page, "figure")[0], "li")]
    assert legend[0] == "right pairs, mean 0.500"
    assert legend[1] == "hardest negative of each image, mean –"
    assert "no shards to take pictures and captions from" in text(one(page, "section", id="examples"))
    for line in every(page, "polyline"):
        assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in points(line))


def test_what_comes_from_outside_is_text(write, report, collection):
    """The page has the elements that it has with harmless captions, and holds the others as they are."""
    names = {
        name: tuple(f"{NASTY}{index}" for index in range(len(getattr(collection, name))))
        for name in ("captions", "caption_ids", "image_ids")
    }
    answers = Answers(NASTY, [(0, 0.5)], [(0, 0.25)])
    changed = {"title": NASTY, "settings": {NASTY: "a\udcffb"}, "paths": {"toy": NASTY}}
    nasty = copy.copy(collection)
    vars(nasty).update(names)
    page = parse(write(collection=nasty, examples=200, queries=[answers], **changed))
    harmless = parse(write(examples=200, queries=[Answers("a", [(0, 0.5)], [(0, 0.25)])]))
    assert [element.tag for element in every(page)] == [element.tag for element in every(harmless)]
    assert raw(one(page, "h1")) == raw(one(page, "title")) == raw(one(page, "dt")) == NASTY
    assert raw(one(page, "dd")) == "a?b"
    assert one(page, "th", scope="row").attrib["title"] == NASTY
    section = one(page, "section", id="queries")
    assert raw(one(section, "h3")) == NASTY
    assert [raw(node) for node in every(section, "span", dir="auto")] == [f"{NASTY}0"]
    shown = [raw(node) for node in every(one(page, "section", id="examples"), "span", dir="auto")]
    assert shown
    assert all(text.startswith(NASTY) for text in shown)


@pytest.mark.parametrize("width", [390, 1280])
def test_only_the_table_scrolls_sideways(write, tmp_path, width):
    """In a browser: RSUM is in sight, and nothing runs off the page, whatever the length of the names."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        pytest.skip("no Chromium or Chrome is installed")
    metrics = retrieval_metrics(similarity_ranks(torch.eye(24), torch.arange(24), negatives=5))
    report = write(results={"a_run_with_a_long_name_" * 4: metrics, "short": metrics})
    page = report.read_text().replace("<details>", "<details open>")
    # The page itself lets no script run, and a window is at least 500 pixels wide, unlike a frame.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page, count=1)
    script = "parent.postMessage([document.documentElement.scrollWidth, innerWidth,"
    script += "document.querySelector('td.rsum').getBoundingClientRect().right,"
    script += "document.querySelector('table').getBoundingClientRect().right].join(' '), '*')"
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    (tmp_path / "frame.html").write_text(
        "<body><script>onmessage = (event) => (document.title = event.data)</script>"
        f"<iframe src='page.html' width='{width}' height='800' style='border:0'></iframe></body>"
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}/profile"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True)
    scrolled, window, rsum, table = map(float, re.search(r"<title>([\d. ]+)</title>", finished.stdout)[1].split())
    assert scrolled <= window == width
    assert rsum <= 0.7 * width
    assert table <= width or width == 390
