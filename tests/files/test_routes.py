"""Files, as the official SDK uses them."""

import json

from openai import OpenAI

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
DATA = (json.dumps(ROW) + "\n").encode()


class TestCreateFile:
    def test_training_data_is_stored_and_validated_at_once(self, client: OpenAI) -> None:
        file = client.files.create(file=("train.jsonl", DATA), purpose="fine-tune")
        assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "train.jsonl", len(DATA), "fine-tune")
        assert file.status == "processed"
        assert isinstance(file.created_at, int)
        assert client.files.wait_for_processing(file.id).id == file.id

    def test_bare_bytes_are_accepted(self, client: OpenAI) -> None:
        assert client.files.create(file=DATA, purpose="fine-tune").filename == "upload"
