"""Retrieval as plain loops over Python numbers, and how evaluation code in torch usually does it.

``scores`` is a list of rows, one for each query that there could be, with a number for each candidate. ``answers`` maps
each query to its right candidates, as indices; -1 stands for one that is not among the candidates.
"""

import torch

__all__ = ["by_image_and_by_caption", "direction", "dot", "full_argsort", "matrix", "ranking"]


def dot(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))


def matrix(images, captions, similarity=dot):
    """Similarities of nested lists of numbers, a row for each image."""
    return [[similarity(image, caption) for caption in captions] for image in images]


def by_image_and_by_caption(image_of_caption):
    """The answers of both directions, from a list with the image of each caption."""
    by_image, by_caption = {}, {}
    for caption, image in enumerate(image_of_caption):
        by_image.setdefault(image, []).append(caption)
        by_caption[caption] = [image]
    return by_image, by_caption


def direction(scores, answers, top):
    """The fields of ``DirectionRanks`` as lists; of candidates with equal scores the first one comes first."""
    names = "queries rank relevant average_precision r_precision positive_query positives positive_similarity "
    result = {name: [] for name in (names + "negatives negative_similarity").split()}
    for position, query in enumerate(sorted(answers)):
        row = scores[query]
        right = {candidate for candidate in answers[query] if candidate >= 0}
        relevant = len(right) + sum(candidate < 0 for candidate in answers[query])
        order = ranking(row, right)
        rank = 1
        for candidate in range(len(row)):
            if candidate not in right and row[candidate] >= max(row[answer] for answer in right):
                rank += 1
        found, total = 0, 0.0
        for place, candidate in enumerate(order[:relevant], start=1):
            if candidate in right:
                found += 1
                total += found / place
        result["queries"].append(query)
        result["rank"].append(rank)
        result["relevant"].append(relevant)
        result["average_precision"].append(total / relevant)
        result["r_precision"].append(found / relevant)
        for candidate in order:
            if candidate in right:
                result["positive_query"].append(position)
                result["positives"].append(candidate)
                result["positive_similarity"].append(row[candidate])
        wrong = [candidate for candidate in order if candidate not in right][:top]
        missing = min(top, len(row)) - len(wrong)
        result["negatives"].append(wrong + [-1] * missing)
        result["negative_similarity"].append([row[candidate] for candidate in wrong] + [float("-inf")] * missing)
    return result


def ranking(row, right):
    """Candidates from the best to the worst, a wrong one before a right one of equal score."""
    return sorted(range(len(row)), key=lambda candidate: (-row[candidate], candidate in right))


def full_argsort(images, captions, captions_per_image):
    """Ranks of images and of captions by sorting everything, as open_clip 3.3.0 validates pairs of one caption.

    With several captions, which stand next to each other in the order of their images, the rank of an image is that of
    its best one. Ties are in any order.
    """
    by_image = images @ captions.T
    captions_of_image = torch.arange(len(captions)).view(-1, captions_per_image)
    image_of_caption = torch.arange(len(images)).repeat_interleave(captions_per_image).view(-1, 1)
    ranks = []
    for logits, answers in ((by_image, captions_of_image), (by_image.T, image_of_caption)):
        order = torch.argsort(logits, descending=True)
        places = [torch.where(order == answer)[1] for answer in answers.split(1, dim=1)]
        ranks.append(1 + torch.stack(places).amin(dim=0))
    return ranks
