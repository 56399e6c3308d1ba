import copy
import re
from dataclasses import replace

import pytest
import torch

from tests.helpers.pages import NASTY, every, parse, raw, text
from vl_plugins.data import read_collection
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.comparison_report import ComparedModel, Comparison
from vl_plugins.retrieval.disagreement import caption_groups, group_differences
from vl_plugins.retrieval.report import write_report

pytest.importorskip("PIL")

TABLE = [["", "seeds", "RSUM"], ["unified", "1 vs 1", "421.9"], ["a|b <i>", "1 vs 1", "-1.4 ± 5.4"]]
NOTES = ["RSUM decides.", "unified: fewer than three seeds on a side."]


@pytest.fixture(scope="module")
def collection(toy_shards):
    return read_collection(sorted(map(str, toy_shards.glob("toy-test-*.tar"))))


def toy_matrix(collection, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(len(collection), 8, generator=torch.Generator().manual_seed(99))
    captions = images[collection.image_of_caption]
    captions = captions + 2 * torch.randn(captions.shape, generator=generator)
    return torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(captions).T


@pytest.fixture(scope="module")
def matrices(collection):
    return {name: toy_matrix(collection, seed) for seed, name in enumerate(["clip", "unified", "other"])}


@pytest.fixture(scope="module")
def comparison(matrices, collection):
    models = []
    for name, matrix in matrices.items():
        ranks = similarity_ranks(matrix, collection.image_of_caption)
        models.append(ComparedModel(name=name, ranks=ranks, hits=(ranks.text_to_image.rank == 1).double()))
    baseline, *others = models
    return Comparison(title="Differences from clip", baseline=baseline, models=others, table=TABLE, notes=NOTES)


@pytest.fixture(scope="module")
def write(tmp_path_factory, comparison, collection):
    """Function that writes the page of a comparison, with other arguments where they are given."""

    def write_page(**changed):
        file = tmp_path_factory.mktemp("report") / "report.html"
        ranks = changed.pop("ranks", comparison.baseline.ranks)
        arguments = {
            "tables": [{"clip": retrieval_metrics(ranks)}],
            "title": "Three models",
            "settings": {"model": "vl-tiny"},
            "collection": collection,
            "comparison": comparison,
            "model": "clip",
            "examples": 2,
        }
        write_report(file, ranks, **(arguments | changed))
        return file

    return write_page


@pytest.fixture(scope="module")
def page(write):
    return parse(write())


def lists(page):
    """The lists of queries that one model alone finds, four of each model."""
    return [details for details in every(page, "details") if every(details, "li", class_="example pair")]


def test_the_page_has_the_table_and_the_notes_that_are_passed(page):
    (table,) = every(page, "table", class_="differences")
    assert [[text(cell) for cell in row] for row in every(table, "tr")] == TABLE
    assert [text(note) for note in every(page, "p", class_="note")] == NOTES


def test_headings_name_the_models(page):
    assert [text(heading) for heading in (*every(page, "h1"), *every(page, "h2"), *every(page, "h3"))] == [
        "Three models",
        "Results",
        "Differences from clip",
        "Similarities and ranks of clip",
        "Examples of clip",
        "unified and clip",
        "other and clip",
    ]


def test_the_title_of_the_page_is_the_one_that_is_passed(page):
    assert text(every(page, "title")[0]) == "Three models"


@pytest.mark.parametrize("place", [0, 1])
def test_lists_have_the_queries_that_one_model_alone_finds(page, matrices, collection, place):
    name = ["unified", "other"][place]
    owners = collection.image_of_caption.tolist()
    shown = iter(lists(page)[4 * place : 4 * place + 4])
    for kind in ("image", "caption"):
        ranks = {}
        for model in ("clip", name):
            matrix = matrices[model] if kind == "image" else matrices[model].T
            ranks[model] = loop_ranks(matrix.tolist(), owners, kind)
        for finder, loser in ((name, "clip"), ("clip", name)):
            found = []
            for query, rank in enumerate(ranks[finder]):
                if rank == 1 < ranks[loser][query]:
                    found.append((-ranks[loser][query], query))
            queries = [query for _, query in sorted(found)]
            details = next(shown)
            direction = "Image to text" if kind == "image" else "Text to image"
            summary = f"{direction}: only {finder} finds {len(queries)} of {len(ranks[finder])} queries"
            if len(queries) > 6:
                summary += ", 6 shown"
            assert text(every(details, "summary")[0]) == summary
            examples = every(details, "li", class_="example pair")
            ids = collection.image_ids if kind == "image" else collection.caption_ids
            assert len(examples) == min(6, len(queries)) > 0
            for example, query in zip(examples, queries, strict=False):
                own, *sides = example
                assert text(own).endswith(f"{kind} {ids[query]}")
                for side, model in zip(sides, (name, "clip"), strict=True):
                    assert text(side).startswith(f"{model}, rank {ranks[model][query]} ")
                    check_answers(side, matrices[model], query, kind, collection)


def loop_ranks(rows, owners, kind):
    ranks = []
    for query, row in enumerate(rows):
        right = {c for c in range(len(row)) if (owners[c] == query if kind == "image" else c == owners[query])}
        best = max(row[candidate] for candidate in right)
        ranks.append(1 + sum(row[candidate] >= best for candidate in range(len(row)) if candidate not in right))
    return ranks


def check_answers(side, matrix, query, kind, collection):
    """The first answers are those of the matrix, and the right ones are framed."""
    row = matrix[query].tolist() if kind == "image" else matrix[:, query].tolist()
    order = sorted(range(len(row)), key=lambda candidate: -row[candidate])
    answers = every(side, "li")
    assert len(answers) >= 5
    for answer, candidate in zip(answers[:5], order, strict=False):
        if kind == "image":
            is_right = collection.image_of_caption[candidate] == query
            assert text(every(answer, "span")[-1]) == text_of(collection.captions[candidate])
        else:
            is_right = collection.image_of_caption[query] == candidate
            assert every(answer, "svg")[0].attrib["aria-label"] == collection.keys[candidate]
        assert answer.attrib["class"] == ("right" if is_right else "wrong")
    assert any(answer.attrib["class"] == "right" for answer in answers)


def text_of(caption):
    return " ".join(caption.split())


def test_groups_are_black_where_they_are_resolved_and_grey_elsewhere(write, comparison, collection):
    """The model finds what the baseline finds, but for captions with the word "triangle"."""
    captions = [f"{caption} w{index % 3}" for index, caption in enumerate(collection.captions)]
    more_words = collection.with_captions(torch.arange(len(captions)))
    vars(more_words)["captions"] = captions
    baseline = replace(comparison.baseline, hits=torch.ones(len(captions)))
    hits = torch.tensor([float("triangle" not in caption) for caption in captions])
    blind = replace(comparison.models[0], hits=hits)
    compared = replace(comparison, baseline=baseline, models=[blind])
    page = parse(write(comparison=compared, collection=more_words))
    (table,) = every(page, "table", class_="groups")
    _, of_all, *rows = every(table, "tr")
    with_word = sum("triangle" in caption for caption in captions)
    percent = f"{100 * (1 - with_word / len(captions)):.1f}"
    minus = f"{-100 * with_word / len(captions):+.1f}"
    assert [text(cell) for cell in of_all] == ["all captions", "120", "24", percent, "100.0", minus, "", ""]
    assert [text(cell) for cell in rows[0]][:6] == [
        "“triangle”",
        str(with_word),
        str(len({collection.image_of_caption[i].item() for i in range(120) if "triangle" in captions[i]})),
        "0.0",
        "100.0",
        "-100.0",
    ]
    groups = group_differences(hits, baseline.hits, collection.image_of_caption, caption_groups(captions))
    assert len(groups) > 12
    assert groups[0].resolved
    assert not groups[11].resolved
    assert [text(row[0]) for row in rows] == [group.name for group in groups[:12]]
    assert ["class" in row.attrib for row in rows] == [not group.resolved for group in groups[:12]]
    for row, group in zip(rows, groups, strict=False):
        assert text(row[6]) == f"{group.deviation:+.1f}"
        assert text(row[7]) == f"[{group.low:+.1f}, {group.high:+.1f}]"
    resolved = sum(group.resolved for group in groups)
    sentence = (
        f"the 12 of {len(groups)} groups that deviate most clearly from all captions. {resolved} of {len(groups)} are"
    )
    assert sentence in text(page)


def test_each_picture_is_in_the_page_once(write, page):
    pictures = [image.attrib["href"] for image in every(page, "image")]
    assert len(set(pictures)) == len(pictures) <= 24
    ids = {"#" + image.attrib["id"] for image in every(page, "image")}
    uses = [use.attrib["href"] for use in every(page, "use")]
    assert set(uses) == ids
    assert len(uses) > 2 * len(ids)
    assert write().read_text().count("data:image/jpeg") == len(pictures)


def test_the_page_has_no_scripts_and_loads_nothing(page):
    assert not every(page, "script")
    for element in every(page):
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert re.match(r"data:image/(jpeg|svg\+xml);base64,|#picture-\d+$", value)


def test_seeds_are_mentioned_where_there_are_several(write, comparison, page):
    sentence = "Their answers are those of the first seed of each model; groups take the mean over the seeds."
    assert sentence not in text(page)
    models = [replace(model, seeds=3) for model in comparison.models]
    assert sentence in text(parse(write(comparison=replace(comparison, models=models))))


def test_without_the_shards_there_are_differences_but_no_groups_and_no_examples(write):
    page = parse(write(collection=None))
    assert every(page, "table", class_="differences")
    assert not every(page, "table", class_="groups")
    assert not every(page, "details")
    assert "Without the shards" in text(page)


def test_a_few_captions_are_not_grouped(write, comparison, collection):
    few = collection.with_captions(torch.arange(0, 120, 5))
    ranks = similarity_ranks(torch.eye(24), torch.arange(24))
    models = []
    for model in (comparison.baseline, *comparison.models):
        models.append(replace(model, ranks=ranks, hits=torch.ones(24)))
    changed = replace(comparison, baseline=models[0], models=models[1:])
    page = parse(write(comparison=changed, collection=few, ranks=ranks))
    assert text(page).count("There are too few captions to compare groups of them.") == 2
    assert "only unified finds 0 of 24 queries" in text(page)


def test_models_of_other_queries_are_refused(write, comparison):
    other = similarity_ranks(torch.eye(24), torch.arange(24))
    models = [replace(comparison.models[0], ranks=other)]
    with pytest.raises(ValueError, match="the same queries"):
        write(comparison=replace(comparison, models=models))


def test_what_comes_from_outside_is_text(write, comparison, collection, page):
    """The page has the elements that it has with harmless names, and holds the others as they are."""
    nasty = copy.copy(collection)
    for name in ("keys", "caption_ids", "image_ids"):
        vars(nasty)[name] = [f"{NASTY}{index}" for index in range(len(getattr(collection, name)))]
    vars(nasty)["captions"] = [f"{caption} {NASTY}" for caption in collection.captions]
    nasty.pictures = collection.pictures  # which would notice the other keys
    baseline = replace(comparison.baseline, name=f"{NASTY}0")
    models = [replace(model, name=f"{NASTY}{number}") for number, model in enumerate(comparison.models, start=1)]
    changed = Comparison(
        title=NASTY,
        baseline=baseline,
        models=models,
        table=[[cell + NASTY for cell in row] for row in TABLE],
        notes=[NASTY, NASTY],
    )
    nasty_page = parse(write(comparison=changed, collection=nasty, model=NASTY))
    assert [element.tag for element in every(nasty_page)] == [element.tag for element in every(page)]
    assert [raw(heading) for heading in every(nasty_page, "h3")] == [f"{NASTY}{n} and {NASTY}0" for n in (1, 2)]
    assert [raw(note) for note in every(nasty_page, "p", class_="note")] == [NASTY, NASTY]
    (table,) = every(nasty_page, "table", class_="differences")
    assert [[raw(cell) for cell in row] for row in every(table, "tr")] == changed.table
    assert [raw(heading) for heading in every(nasty_page, "h2")][1:3] == [NASTY, f"Similarities and ranks of {NASTY}"]
    shown = [raw(bold) for bold in every(nasty_page, "b")]
    assert f"{NASTY}0" in shown
    assert f"{NASTY}1" in shown


def test_words_and_groups_of_the_shards_are_text_too(write, comparison, collection):
    """Each caption has one more word, and all images of the first half a group."""
    nasty = copy.copy(collection)
    word = "<script>alert('x')</script>&amp;"
    captions = []
    for index, caption in enumerate(collection.captions):
        captions.append(f"{word}x {caption}" if index % 2 else caption)
    vars(nasty)["captions"] = captions
    records = copy.deepcopy(collection.records)
    for record in records[:12]:
        record.group = NASTY
    vars(nasty)["records"] = records
    hits = torch.tensor([float(index % 2) for index in range(120)])
    of_group = torch.tensor([float(index < 60) for index in range(120)])
    baseline = replace(comparison.baseline, hits=torch.zeros(120))
    models = [replace(comparison.models[0], hits=hits), replace(comparison.models[1], hits=of_group)]
    page = parse(write(comparison=replace(comparison, baseline=baseline, models=models), collection=nasty))
    names = [raw(every(table, "tr[3]/th")[0]) for table in every(page, "table", class_="groups")]
    assert names == [f"“{word.lstrip('<')}x”", f"group {NASTY}"]
