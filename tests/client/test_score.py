"""Scores of sequences under adapters."""

import numpy as np


def test_scores_sequences_under_adapters(client, folder):
    client.publish("a", path=folder)
    result = client.score(
        [[1, 2, 3], np.array([4, 5])], [None, "a", "a@1"], top_k=2, chosen_token_ids=[7]
    )
    assert len(result) == 2 and len(result[0]) == 3
    assert result[0][1].dtype == np.float32 and result[0][1].shape == (3,)
    assert np.isnan(result[0][0][0]) and result[1, 2][1] == np.float32(-0.07)
    np.testing.assert_allclose(result[0][1][1:], [-0.03, -0.04], rtol=1e-6)
    assert [v.label for v in result.versions] == [None, "a@1", "a@1"]
    assert result.top_logprobs[0][0].token_ids.tolist() == [[-1, -1], [0, 1], [0, 1]]
    assert result.chosen_logprobs[1][0].shape == (2, 1)


def test_scores_the_base_model_by_default(client):
    result = client.score([[1, 2]])
    assert len(result[0]) == 1 and result.top_logprobs is None and result.chosen_logprobs is None


def test_scores_under_one_adapter_given_by_its_name(client):
    client.publish("policy", tensors={"w": np.ones(2, np.float32)}, config={})
    result = client.score([[1, 2, 3]], "policy")
    assert [version.label for version in result.versions] == ["policy@1"]
    assert len(result[0]) == 1
