"""The recalls of other tools' rules by plain loops that sort whole rows of similarities, in float64.

Nothing here is shared with ``vl_plugins``: every rule has a list of similarities of each query, a set of right
candidates, an order of ties, and what a query scores.
"""

from statistics import fmean

CUTOFFS = (1, 5, 10)


def any_right(right_in_list, all_right, k):
    return float(right_in_list > 0)


def share_of_answers(right_in_list, all_right, k):
    return right_in_list / all_right


def precision(right_in_list, all_right, k):
    return right_in_list / k


def ends(scores, right, score, only_positive=False):
    """Return the means for each K with wrong candidates before right ones of equal similarity, and after them."""
    low = means(scores, right, score, lambda query, candidate: candidate in right[query], only_positive)
    high = means(scores, right, score, lambda query, candidate: candidate not in right[query], only_positive)
    return low, high


def rising_ids(scores, right, score, ids):
    value = means(scores, right, score, lambda query, candidate: ids[candidate])
    return value, value


def falling_ids(scores, right, score, ids):
    place = {name: number for number, name in enumerate(sorted(ids, reverse=True))}
    value = means(scores, right, score, lambda query, candidate: place[ids[candidate]])
    return value, value


def means(scores, right, score, tie_key, only_positive=False):
    """Return the mean over the queries for each K.

    Args:
        scores: list of the similarities of each query.
        right: set of the right candidates of each query.
        score: of one query.
        tie_key: of a query and a candidate; of equally similar candidates the lowest is first.
        only_positive: right candidates without a similarity above 0 are not counted.
    """
    result = []
    for k in CUTOFFS:
        values = []
        for query, row in enumerate(scores):
            order = sorted(range(len(row)), key=lambda candidate: (-row[candidate], tie_key(query, candidate)))
            hits = 0
            for candidate in order[:k]:
                if candidate in right[query] and (row[candidate] > 0 or not only_positive):
                    hits += 1
            values.append(score(hits, len(right[query]), k))
        result.append(fmean(values))
    return result


def expected_numbers(scores, owners, image_ids, caption_ids):
    """Return ``{(tool, rule): (i2t, t2i)}``, each direction the low and the high end for each K.

    Args:
        scores: rows of the similarities of each image with all captions.
        owners: the image of each caption.
        image_ids, caption_ids: texts.
    """
    of_images = (scores, [{c for c, owner in enumerate(owners) if owner == image} for image in range(len(scores))])
    of_captions = (transposed(scores), [{owner} for owner in owners])
    both = (of_images, of_captions)
    low = [ends(*direction, any_right)[0] for direction in both]
    by_ends = tuple(ends(*direction, any_right) for direction in both)
    ids = (caption_ids, image_ids)

    def ordered(order, score):
        return tuple(order(*direction, score, names) for direction, names in zip(both, ids, strict=True))

    return {
        ("vl_plugins", "best right answer"): ((low[0], low[0]), (low[1], low[1])),
        ("open_clip", "a row for each caption"): rows_for_captions(scores, owners),
        ("open_clip", "first captions"): first_captions(scores, owners),
        ("CLIP_benchmark", "any right answer"): by_ends,
        ("sentence-transformers", "accuracy@K"): ordered(rising_ids, any_right),
        ("sentence-transformers", "recall@K"): ordered(rising_ids, share_of_answers),
        ("sentence-transformers", "precision@K"): ordered(rising_ids, precision),
        ("mteb", "recall@K"): ordered(falling_ids, share_of_answers),
        ("mteb", "hit_rate@K"): ordered(falling_ids, any_right),
        ("torchmetrics", "RetrievalRecall"): tuple(ends(*one, share_of_answers, only_positive=True) for one in both),
        ("torchmetrics", "RetrievalHitRate"): by_ends,
        ("torchmetrics", "RetrievalPrecision"): tuple(ends(*one, precision, only_positive=True) for one in both),
        ("eccv_caption", "compute_r_at_k"): by_ends,
        ("VSE++", "i2t, t2i"): by_ends,
    }


def rows_for_captions(scores, owners):
    """A row of an image for each of its captions, and a column for each caption; the diagonal is right."""
    square = [[scores[owner][caption] for caption in range(len(owners))] for owner in owners]
    diagonal = [{row} for row in range(len(owners))]
    return ends(square, diagonal, any_right), ends(transposed(square), diagonal, any_right)


def first_captions(scores, owners):
    firsts = [owners.index(image) for image in range(len(scores))]
    square = [[row[caption] for caption in firsts] for row in scores]
    diagonal = [{row} for row in range(len(scores))]
    return ends(square, diagonal, any_right), ends(transposed(square), diagonal, any_right)


def fold_means(scores, owners, folds):
    """Return the means over folds of consecutive images, each with its captions as its own gallery."""
    size = len(scores) // folds
    results = []
    for fold in range(folds):
        images = range(fold * size, (fold + 1) * size)
        captions = [caption for caption, owner in enumerate(owners) if owner in images]
        part = [[scores[image][caption] for caption in captions] for image in images]
        own = [owners[caption] - fold * size for caption in captions]
        of_images = [{c for c, owner in enumerate(own) if owner == image} for image in range(size)]
        of_captions = [{owner} for owner in own]
        results.append((ends(part, of_images, any_right), ends(transposed(part), of_captions, any_right)))
    directions = []
    for direction in (0, 1):
        both_ends = []
        for end in (0, 1):
            both_ends.append([fmean(result[direction][end][column] for result in results) for column in range(3)])
        directions.append(tuple(both_ends))
    return tuple(directions)


def transposed(rows):
    return [list(column) for column in zip(*rows, strict=True)]
