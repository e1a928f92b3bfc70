"""Web apps, each in one file, that show how to submit, stream, reconnect, poll and cancel with a framework.

    GET    /ask?question=…                      the answer as server-sent events; disconnecting cancels it
    GET    /answers/{id}/stream?question=…      the same under an id: a client can reconnect within 10 s, to any
                                                process; without a question it attaches to a running answer
    POST   /answers/{id}?question=…             generate an answer in the background
    GET    /answers/{id}                        its text, or its state (202)
    DELETE /answers/{id}                        cancel it

``fastapi_app``, ``starlette_app``, ``django_app`` and ``flask_app`` behave alike, and are run by
``tests/e2e/documents/test_examples.py``. A public app would authenticate its users, and keep their ids apart.
"""
