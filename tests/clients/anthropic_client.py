"""What Anthropic's official client must get from a server of SmolLM2-135M-Instruct: run by tests/clients/run."""

import asyncio
import json
import sys

import anthropic

url, layout, has_tools = sys.argv[1].removesuffix("/v1"), sys.argv[2], sys.argv[3:] == ["tools"]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
model = client.models.list().data[0].id
ask = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
# The API takes it; this version of the client has no argument for it.
greedy = {"temperature": 0}
base = dict(model=model, messages=ask, max_tokens=16, extra_body=greedy)
weather = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def total(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


# A sensible answer, and the usage adds up to what is counted.
answer = client.messages.create(**base)
text = answer.content[0].text
assert "Paris" in text and answer.role == "assistant" and answer.type == "message", answer
assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0, answer
counted = client.messages.count_tokens(model=model, messages=ask)
assert counted.input_tokens == total(answer.usage), (counted, answer.usage)

# A stream says the same: as raw events, and as the client puts them together.
events = list(client.messages.create(**base, stream=True))
assert events[0].type == "message_start" and events[-1].type == "message_stop", events
assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == text, events
with client.messages.stream(**base) as stream:
    assert "".join(stream.text_stream) == text
    final = stream.get_final_message()
assert final.content[0].text == text and final.stop_reason == answer.stop_reason, final
assert total(final.usage) == total(answer.usage) and final.usage.output_tokens == answer.usage.output_tokens, final

# System blocks with cache marks, a conversation, the end of an answer that the client began.
system = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
talk = ask + [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And of Italy?"}]
with_system = client.messages.create(**{**base, "messages": talk}, system=system)
assert with_system.content[0].text, with_system
begun = ask + [{"role": "assistant", "content": "The capital of France is"}]
assert "Paris" in client.messages.create(**{**base, "messages": begun}).content[0].text

# Reasons.
count = [{"role": "user", "content": "Count from 1 to 20."}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
stopped = client.messages.create(**{**base, "messages": count, "max_tokens": 60}, stop_sequences=["zzz", "7"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "7"), stopped
assert "7" not in stopped.content[0].text
cut = client.messages.create(**{**base, "messages": count, "max_tokens": 3})
assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3, cut
client.messages.create(**{**base, "max_tokens": 3}, thinking={"type": "disabled"}, metadata={"user_id": "me"})

# A format of the answer holds, whole and streamed.
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
shaped = {**base, "max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
whole = client.messages.create(**shaped)
assert whole.stop_reason == "end_turn" and list(json.loads(whole.content[0].text)) == ["city"], whole
with client.messages.stream(**shaped) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text

# A repeated prompt is found in the cache.
long = [{"role": "user", "content": "Tell me about the sea. " * 40}]
for _ in range(2):
    again = client.messages.create(**{**base, "messages": long, "max_tokens": 1})
if "dp" not in layout:
    assert again.usage.cache_read_input_tokens >= total(again.usage) - 17, again.usage

# Errors are the client's own classes, with the id of the request.
refused = (
    dict(max_tokens=0),
    dict(extra_body={"temperature": 1.5}),
    dict(messages=[]),
    dict(service_tier="priority"),
    dict(extra_body={"nonsense": 1}),
    dict(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    dict(messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}]}]),
)
for wrong in refused:
    try:
        client.messages.create(**{**base, **wrong})
        raise AssertionError(f"{wrong} was accepted")
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error" and error.request_id, error.body
        assert error.body["request_id"] == error.request_id, error.body
try:
    client.messages.create(**{**base, "model": "claude"})
    raise AssertionError("an unknown model was accepted")
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"

# Tools: where the template shows them, the model may call or not; whatever it says, a stream says the same.
tooled = {**base, "max_tokens": 40, "tools": [weather]}
if has_tools:
    whole = client.messages.create(**tooled)
    assert total(whole.usage) == client.messages.count_tokens(model=model, messages=ask, tools=[weather]).input_tokens
    assert total(whole.usage) > total(answer.usage), "the prompt shows the tool"
    with client.messages.stream(**tooled) as stream:
        streamed = stream.get_final_message()
    # Of a call that is cut the client itself makes an input out of what the stream had; the whole answer has none.
    is_whole = whole.stop_reason != "max_tokens"
    said = [
        [(b.type, getattr(b, "text", None), is_whole and getattr(b, "input", None)) for b in m.content]
        for m in (whole, streamed)
    ]
    assert said[0] == said[1] and streamed.stop_reason == whole.stop_reason, (whole, streamed)
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain, 12 degrees."}]}
    past = ask + [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**tooled, "messages": past}).content, "an answer to the tool's result"
    try:
        client.messages.create(**{**tooled, "messages": past[:-1] + ask})
        raise AssertionError("a call without its result was accepted")
    except anthropic.BadRequestError as error:
        assert "toolu_1" in str(error), error
else:
    try:
        client.messages.create(**tooled)
        raise AssertionError("tools that the model never sees were accepted")
    except anthropic.BadRequestError as error:
        assert "tools" in str(error), error


async def at_once():
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other:
        answers = await asyncio.gather(*(other.messages.create(**base) for _ in range(8)))
        assert all(a.content[0].text == text for a in answers), answers
        async with other.messages.stream(**base) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == text
        # A stream that is dropped in the middle.
        async with other.messages.stream(**{**base, "messages": count, "max_tokens": 400}) as stream:
            async for _ in stream.text_stream:
                break


asyncio.run(at_once())
assert client.messages.create(**base).content[0].text == text
print(f"anthropic {anthropic.__version__}: all held")
