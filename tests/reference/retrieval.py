"""Retrieval ranks as plain loops over Python numbers."""


def dot(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))


def best_positive_ranks(scores, is_positive):
    """Rank per query of a list of rows: every wrong candidate at or above the best right one pushes it down."""
    ranks = []
    for row, positive_row in zip(scores, is_positive, strict=True):
        best = max(score for score, positive in zip(row, positive_row, strict=True) if positive)
        rank = 1
        for score, positive in zip(row, positive_row, strict=True):
            if not positive and score >= best:
                rank += 1
        ranks.append(rank)
    return ranks


def hardest_negatives(scores, is_positive):
    return [
        max(score for score, positive in zip(row, positive_row, strict=True) if not positive)
        for row, positive_row in zip(scores, is_positive, strict=True)
    ]


def retrieval(image_embeddings, caption_embeddings, image_of_caption, similarity=dot):
    """Return ranks, positive similarities and hardest negatives of nested lists of numbers, as a dict of lists."""
    scores = [[similarity(image, caption) for caption in caption_embeddings] for image in image_embeddings]
    is_positive = [[owner == image for owner in image_of_caption] for image in range(len(image_embeddings))]
    scores_by_caption = [list(column) for column in zip(*scores, strict=True)]
    is_positive_by_caption = [list(column) for column in zip(*is_positive, strict=True)]
    return {
        "image_to_text": best_positive_ranks(scores, is_positive),
        "text_to_image": best_positive_ranks(scores_by_caption, is_positive_by_caption),
        "positive_similarity": [scores[image][caption] for caption, image in enumerate(image_of_caption)],
        "image_to_text_hardest_negative": hardest_negatives(scores, is_positive),
        "text_to_image_hardest_negative": hardest_negatives(scores_by_caption, is_positive_by_caption),
    }


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    if len(values) % 2:
        return float(values[middle])
    return (values[middle - 1] + values[middle]) / 2
