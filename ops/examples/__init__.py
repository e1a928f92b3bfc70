"""Web apps, each whole in one file, that show how a framework asks, streams, comes back, polls and cancels.

    GET    /ask?question=…                      the answer as server-sent events; going away cancels it
    GET    /answers/{id}/stream?question=…      the same under an id: whoever is cut off comes back within 10 s, to any
                                                process; without a question it attaches to what runs
    POST   /answers/{id}?question=…             an answer that nobody waits for
    GET    /answers/{id}                        its text, or where it stands (202)
    DELETE /answers/{id}                        cancel it

``fastapi_app``, ``starlette_app``, ``django_app`` and ``flask_app`` answer the same, and are run by
``tests/e2e/documents/test_examples.py``. An app for the public would ask who the reader is, and keep ids apart by that.
"""
