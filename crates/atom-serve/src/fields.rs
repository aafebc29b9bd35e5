//! A JSON object, read field by field: each is taken once, with its type, and what is left at the end
//! was meant for somebody else.

use crate::error::ApiError;
use crate::json;
use serde_json::{Map, Value};

/// The fields of one object that nobody has taken yet. JSON null is the same as absent.
pub(crate) struct Fields {
    /// Where the object sits in the body: empty, or like `messages[2].`
    prefix: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads a request body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let text =
            std::str::from_utf8(body).map_err(|error| ApiError::NotUtf8 { offset: error.valid_up_to() })?;
        match json::parse(text)? {
            Value::Object(map) => Ok(Self { prefix: String::new(), map }),
            other => Err(ApiError::NotJson { reason: format!("it is {}, not an object", describe(&other)) }),
        }
    }

    /// Reads an object that is the value of field `name`.
    pub(crate) fn nested(name: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { prefix: format!("{name}."), map }),
            other => Err(wrong(name, &other, "an object")),
        }
    }

    /// The field's name as the client would spell its place.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Takes a field as it is; `None` when absent or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", |value| value.as_bool())
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.name(name), &other, "a string")),
        }
    }

    /// A string that must be there; `expected` says what to send.
    pub(crate) fn required_string(&mut self, name: &str, expected: &'static str) -> Result<String, ApiError> {
        self.string(name)?.ok_or_else(|| ApiError::Missing { name: self.name(name), expected })
    }

    /// A finite number. One beyond an f32 becomes infinite, which no range of ours contains.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number", |value| value.as_f64().map(|n| n as f32))
    }

    /// A whole number from `low` to `high`.
    pub(crate) fn integer(&mut self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => integer(&self.name(name), &value, low, high).map(Some),
        }
    }

    /// A list.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.name(name), &other, "a list")),
        }
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong(&self.name(name), &other, "an object")),
        }
    }

    /// Takes a field that this server can't act on. Absent, null and the values for which `harmless`
    /// is true, because they ask for what happens anyway, are fine.
    pub(crate) fn refuse_unless(
        &mut self,
        name: &str,
        reason: &'static str,
        harmless: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !harmless(&value) => Err(ApiError::Unsupported { name: self.name(name), reason }),
            _ => Ok(()),
        }
    }

    /// Ends the reading: a field that is left over has no meaning here.
    pub(crate) fn finish(mut self) -> Result<(), ApiError> {
        self.map.retain(|_, value| !value.is_null());
        match self.map.keys().next() {
            Some(name) => Err(ApiError::UnknownField { name: self.name(name) }),
            None => Ok(()),
        }
    }

    /// Refuses every field, null or not: the body of an order, which has none.
    pub(crate) fn refuse_all(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            Some(name) => Err(ApiError::UnknownField { name: self.name(name) }),
            None => Ok(()),
        }
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(wrong(&self.name(name), &value, expected)),
            },
        }
    }
}

/// Reads a whole number; `3.0` is one.
pub(crate) fn integer(name: &str, value: &Value, low: i64, high: i64) -> Result<i64, ApiError> {
    let expected = || format!("a whole number from {low} to {high}");
    // 2^53: beyond, a float no longer says which whole number was meant.
    let whole = |n: f64| (n.fract() == 0.0 && n.abs() <= 9_007_199_254_740_992.0).then_some(n as i64);
    value
        .as_i64()
        .or_else(|| value.as_f64().and_then(whole))
        .filter(|n| (low..=high).contains(n))
        .ok_or_else(|| wrong(name, value, expected()))
}

/// The error for a value of the wrong type or out of range.
pub(crate) fn wrong(name: &str, value: &Value, expected: impl Into<String>) -> ApiError {
    ApiError::BadField { name: name.to_owned(), found: describe(value), expected: expected.into() }
}

/// A value in a few words: scalars as they are, the rest by kind.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.len() <= QUOTED_BYTES_MAX => format!("the string {text:?}"),
        Value::String(text) => format!("a string of {} bytes", text.len()),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(map) => format!("an object of {} fields", map.len()),
    }
}

/// Longer strings are described by their length: an error message is no place for a prompt.
const QUOTED_BYTES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn types_are_checked_and_errors_name_the_field_the_finding_and_the_wish() {
        let message = |text: &str, read: fn(&mut Fields) -> Result<(), ApiError>| {
            read(&mut fields(text)).unwrap_err().to_string()
        };
        assert_eq!(
            message(r#"{"n":"x"}"#, |f| f.integer("n", 1, 8).map(drop)),
            "'n' is the string \"x\"; it must be a whole number from 1 to 8"
        );
        assert_eq!(
            message(r#"{"n":9}"#, |f| f.integer("n", 1, 8).map(drop)),
            "'n' is 9; it must be a whole number from 1 to 8"
        );
        assert!(message(r#"{"n":1.5}"#, |f| f.integer("n", 1, 8).map(drop)).contains("1.5"));
        assert!(message(r#"{"n":1e30}"#, |f| f.integer("n", 1, i64::MAX).map(drop)).contains("1e+30"));
        assert!(message(r#"{"t":[1,2]}"#, |f| f.number("t").map(drop)).contains("a list of 2"));
        assert!(message(r#"{"t":{}}"#, |f| f.string("t").map(drop)).contains("an object of 0 fields"));
        assert!(message(r#"{"t":1}"#, |f| f.boolean("t").map(drop)).contains("true or false"));
        let long = format!(r#"{{"t":"{}"}}"#, "x".repeat(1000));
        assert!(message(&long, |f| f.number("t").map(drop)).contains("a string of 1000 bytes"));
    }

    #[test]
    fn null_is_absent_and_leftovers_are_named_with_their_place() {
        let mut top = fields(r#"{"a":null,"b":{"c":1,"d":null},"e":3.0}"#);
        assert_eq!(top.number("a").unwrap(), None);
        assert_eq!(top.integer("e", 0, 5).unwrap(), Some(3));
        let mut inner = Fields::nested("b", top.take("b").unwrap()).unwrap();
        assert!(inner.take("d").is_none());
        assert_eq!(inner.finish().unwrap_err().to_string(), "unknown field 'b.c'");
        assert!(top.finish().is_ok());
        assert!(fields(r#"{"x":null}"#).finish().is_ok());
    }

    #[test]
    fn what_is_not_a_json_object_is_refused_with_its_place() {
        let message = |body: &[u8]| Fields::parse(body).err().unwrap().to_string();
        assert!(message(b"{\"a\":").contains("line 1"));
        assert!(message(b"[1]").contains("a list of 1"));
        assert!(message(b"{\"a\":1e999}").contains("number out of range"));
        assert!(message(b"{\"a\":NaN}").contains("JSON"));
        assert!(message(b"{\"a\":\"\xff\"}").contains("offset 6"));
        assert!(message(&[b'['; 1000]).contains("recursion limit"));
    }
}
