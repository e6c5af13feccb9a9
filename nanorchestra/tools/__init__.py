"""What the tools of the orchestrator run on.

sandbox: confined Python. corpus, index, vectors, embed, devices: search in a corpus. search: of the
web. models, roles: language models behind endpoints, and the published roles. functions: the user's
own. limits, spending: what calls may cost. http, threads, failures: how they are made, how long
they take at most, and whose fault it is if they fail.
"""
