//! Message content that comes in parts.

use crate::TextError;
use serde_json::Value;
use std::borrow::Cow;

/// The text of a message's `content`: a string as it is, a list of `{"type": "text", "text": ..}` parts
/// joined by line breaks, `null` as nothing. Other kinds of parts (`image_url`, `input_audio` ..) are
/// refused by name. `field` says which content this is, for the error: `messages[2].content`.
pub fn flatten_content<'a>(content: &'a Value, field: &str) -> Result<Cow<'a, str>, TextError> {
    match content {
        Value::Null => Ok(Cow::Borrowed("")),
        Value::String(text) => Ok(Cow::Borrowed(text)),
        Value::Array(parts) => {
            let texts =
                parts.iter().enumerate().map(|(at, part)| part_text(part, || format!("{field}[{at}]")));
            Ok(Cow::Owned(texts.collect::<Result<Vec<_>, _>>()?.join("\n")))
        }
        other => Err(TextError::Request {
            field: field.to_owned(),
            reason: format!("is {}; it must be a string or a list of text parts", kind(other)),
        }),
    }
}

/// Brings the `content` of every message to a string, since templates of text models expect one. Messages
/// without `content` are left alone.
pub fn flatten_messages(messages: &mut Value) -> Result<(), TextError> {
    for (at, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        if let Some(content) = message.get_mut("content")
            && !content.is_string()
        {
            *content =
                Value::String(flatten_content(content, &format!("messages[{at}].content"))?.into_owned());
        }
    }
    Ok(())
}

fn part_text(part: &Value, field: impl Fn() -> String) -> Result<&str, TextError> {
    let refuse = |reason| TextError::Request { field: field(), reason };
    match part["type"].as_str() {
        Some("text") => part["text"].as_str().ok_or_else(|| refuse("needs a string `text`".into())),
        Some(other) => {
            Err(refuse(format!("has type {other:?}; this model reads only parts of type \"text\"")))
        }
        None => Err(refuse("needs a `type`; parts of type \"text\" are read".into())),
    }
}

/// What a JSON value is, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_parts_become_lines_and_strings_stay() {
        let mut messages = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null},
            {"role": "user", "content": "c"},
            {"role": "assistant", "tool_calls": []},
            {"role": "user", "content": []},
        ]);
        flatten_messages(&mut messages).unwrap();
        assert_eq!(
            messages,
            json!([
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": "c"},
                {"role": "assistant", "tool_calls": []},
                {"role": "user", "content": ""},
            ])
        );
    }

    #[test]
    fn other_content_is_refused_by_name_and_place() {
        let refused = |content: Value| {
            let mut messages = json!([{"role": "user", "content": content}]);
            flatten_messages(&mut messages).unwrap_err().to_string()
        };
        let image = refused(json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]));
        assert!(image.contains("messages[0].content[1]") && image.contains("image_url"), "{image}");
        assert!(refused(json!([{"text": "a"}])).contains("needs a `type`"));
        assert!(refused(json!([{"type": "text", "text": 1}])).contains("needs a string `text`"));
        assert!(refused(json!(5)).contains("is a number"));
        assert!(refused(json!(["a"])).contains("needs a `type`"));
    }
}
