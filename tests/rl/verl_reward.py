"""A reward that differs between answers, as verl loads it."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(solution_str.encode()) % 97 / 97
