"""The multi-turn loop, the environment of an attempt, and the policy that decides its turns.

`loop.Rollout` plays attempts on our engine; `policy.EndpointRollout` on a model behind an endpoint.
"""
