"""Web apps, each in one file, which ``penstock example`` prints; ``ops/cli/work/example.py`` lists them.

Those for FastAPI, Starlette, Django and Flask behave alike, and show how to submit, stream, reconnect, poll and cancel:

    GET    /ask?question=…                      the answer as server-sent events; disconnecting cancels it
    GET    /answers/{id}/stream?question=…      the same under an id: a client can reconnect within 10 s, to any
                                                process; without a question it attaches to a running answer
    POST   /answers/{id}?question=…             generate an answer in the background
    GET    /answers/{id}                        its text, or its state (202)
    DELETE /answers/{id}                        cancel it

``tests/e2e/documents/test_examples.py`` runs them. A public app would authenticate its users, and keep their ids apart.
"""
