"""What the official client's responses API must get from a server of SmolLM2-135M-Instruct: run by tests/clients/run."""

import asyncio
import json
import sys
from typing import Literal

import openai
import pydantic

url, layout, has_tools = sys.argv[1], sys.argv[2], sys.argv[3:] == ["tools"]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
model = client.models.list().data[0].id
base = dict(model=model, input="What is the capital of France? Answer with one word.", max_output_tokens=16, temperature=0)
weather = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}

# A sensible answer, complete and typed.
answer = client.responses.create(**base, metadata={"k": "v"}, instructions="You are brief.")
assert answer.object == "response" and answer.metadata == {"k": "v"} and answer.store is False, answer
answer = client.responses.create(**base)
text = answer.output_text
assert "Paris" in text and answer.status in ("completed", "incomplete"), answer
assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens, answer.usage

# A stream says the same: as raw events, and as the client puts them together.
events = list(client.responses.create(**base, stream=True))
assert [event.sequence_number for event in events] == list(range(len(events))), events
assert events[0].type == "response.created" and events[-1].response.status == answer.status, events
assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text, events
assert events[-1].response.output_text == text and events[-1].response.usage.total_tokens == answer.usage.total_tokens
done = {**base, "max_output_tokens": 60}
with client.responses.stream(**done) as stream:
    for event in stream:
        pass
    final = stream.get_final_response()
assert final.status == "completed" and final.output_text == client.responses.create(**done).output_text, final

# The answer goes back as it came; an answer that is cut says so.
talk = [{"role": "user", "content": base["input"]}, *answer.output, {"role": "user", "content": "And of Italy?"}]
assert client.responses.create(**{**base, "input": talk}).output_text
cut = client.responses.create(**{**base, "max_output_tokens": 2})
assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens"), cut

# A format of the answer holds.
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
format = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
shaped = client.responses.create(**{**base, "max_output_tokens": 60}, text={"format": format})
assert shaped.status == "completed" and list(json.loads(shaped.output_text)) == ["city"], shaped

# What isn't kept or can't be done is refused by name.
refused = (
    dict(store=True),
    dict(background=True),
    dict(previous_response_id="resp_1"),
    dict(conversation="conv_1"),
    dict(truncation="auto"),
    dict(include=["message.output_text.logprobs"]),
    dict(max_output_tokens=0),
    dict(temperature=3),
    dict(tools=[{"type": "file_search"}]),
    dict(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y", "detail": "auto"}]}]),
)
for wrong in refused:
    try:
        client.responses.create(**{**base, **wrong})
        raise AssertionError(f"{wrong} was accepted")
    except openai.BadRequestError as error:
        assert error.param.split("[")[0] in wrong, (wrong, error.param)
try:
    client.responses.create(**{**base, "model": "other"})
    raise AssertionError("an unknown model was accepted")
except openai.NotFoundError:
    pass

# Tools: whatever the model says, a stream says the same; calls and their outputs go back.
tooled = {**base, "max_output_tokens": 40, "tools": [weather]}
if has_tools:
    whole = client.responses.create(**tooled)
    *_, last = client.responses.create(**tooled, stream=True)
    said = [[(i.type, getattr(i, "arguments", None)) for i in r.output] for r in (whole, last.response)]
    assert said[0] == said[1] and last.response.output_text == whole.output_text, (whole, last)
    past = [
        {"role": "user", "content": "Weather in Paris?"},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain, 12 degrees."},
    ]
    assert client.responses.create(**{**tooled, "input": past}).output, "an answer to the function's output"

    # What the client makes of types is strict: an answer by choice is a text, or calls with arguments of the type; beside a
    # format it is that, or calls. (The client raises an error for answers that were cut, so those by choice are not parsed.)
    class Weather(pydantic.BaseModel):
        """Tells the weather of a city."""

        city: Literal["Paris", "Ulm"]
        unit: Literal["C", "F"]

    class Place(pydantic.BaseModel):
        country: Literal["France", "Spain"]

    chat = dict(model=model, messages=[{"role": "user", "content": "Weather in Paris?"}], max_tokens=500, temperature=0)
    tools = [openai.pydantic_function_tool(Weather)]
    choice = client.chat.completions.create(**{**chat, "max_tokens": 40}, tools=tools).choices[0]
    for call in choice.message.tool_calls or []:
        if choice.finish_reason == "tool_calls":
            Weather.model_validate_json(call.function.arguments)
    chat["parallel_tool_calls"] = False
    for extra in (dict(response_format=Place), dict(tool_choice="required")):
        choice = client.chat.completions.parse(**chat, tools=tools, **extra).choices[0]
        calls = choice.message.tool_calls or []
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls), choice
        assert calls or isinstance(choice.message.parsed, Place) and "tool_choice" not in extra, choice
else:
    try:
        client.responses.create(**tooled)
        raise AssertionError("tools that the model never sees were accepted")
    except openai.BadRequestError as error:
        assert error.param == "tools", error


async def at_once():
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as other:
        answers = await asyncio.gather(*(other.responses.create(**base) for _ in range(8)))
        assert all(a.output_text == text for a in answers), answers
        pieces = [e.delta async for e in await other.responses.create(**base, stream=True) if e.type == "response.output_text.delta"]
        assert "".join(pieces) == text, pieces


asyncio.run(at_once())
print(f"openai {openai.__version__}, responses: all held")
