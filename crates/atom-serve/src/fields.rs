//! A JSON object, read field by field as it is declared: each is taken once, and what is left at the end was meant
//! for somebody else.

use crate::declare::{Field, Object, Takes, only};
use crate::error::ApiError;
use crate::json;
use serde_json::{Map, Value};

/// The fields of one object that nobody has taken yet. JSON null is the same as absent.
///
/// Every field that is asked for must be declared, with the type that it is asked for by: else it is our bug, and
/// a panic whether the body has the field or not.
pub(crate) struct Fields {
    /// Where the object sits in the body: empty, or like `messages[2].`
    prefix: String,
    declared: &'static Object,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads a request body.
    pub(crate) fn parse(body: &[u8], declared: &'static Object) -> Result<Self, ApiError> {
        let text =
            std::str::from_utf8(body).map_err(|error| ApiError::NotUtf8 { offset: error.valid_up_to() })?;
        if text.trim_ascii().is_empty() {
            return Err(ApiError::NotObject { found: "empty".into() });
        }
        match json::parse(text)? {
            Value::Object(map) => Ok(Self { prefix: String::new(), declared, map }),
            other => Err(ApiError::NotObject { found: describe(&other) }),
        }
    }

    /// Reads an object that is the value of field `name`.
    pub(crate) fn nested(name: &str, value: Value, declared: &'static Object) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { prefix: format!("{name}."), declared, map }),
            other => Err(wrong(name, &other, "an object")),
        }
    }

    /// Takes a field that is an object.
    pub(crate) fn inner(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let (declared, is_filled) = match self.declared(name).takes {
            Takes::Object(declared) => (declared, false),
            Takes::Filled(declared) => (declared, true),
            _ => self.misread(name),
        };
        let place = self.name(name);
        let inner = self.take(name).map(|value| Self::nested(&place, value, declared)).transpose()?;
        match inner {
            Some(inner) if is_filled && inner.has_nothing() => {
                let known: Vec<_> = declared.fields().map(|field| field.name).collect();
                let expected = format!("left out, or have one of {}", known.join(", "));
                Err(ApiError::BadField { name: place, found: "an object that says nothing".into(), expected })
            }
            inner => Ok(inner),
        }
    }

    /// Says what kind of object it is after all: a field that says so has been read.
    pub(crate) fn is_declared_as(&mut self, declared: &'static Object) {
        self.declared = declared;
    }

    /// The field's name as the client would spell its place.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// True if no field is left that says anything.
    pub(crate) fn has_nothing(&self) -> bool {
        self.map.values().all(Value::is_null)
    }

    /// Takes a field as it is; `None` when absent or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.declared(name);
        self.map.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let Takes::Flag = self.declared(name).takes else { self.misread(name) };
        self.typed(name, "true or false", |value| value.as_bool())
    }

    /// A text. Which words or how many bytes it may have is for the caller to check.
    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let (Takes::Text | Takes::Short(..) | Takes::Pattern(_) | Takes::Word(_) | Takes::Schema(_)) =
            self.declared(name).takes
        else {
            self.misread(name)
        };
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

    /// A number in its declared range.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        let (low, high, is_above) = match self.declared(name).takes {
            Takes::Number(low, high) => (low, high, false),
            Takes::NumberAbove(low, high) => (low, high, true),
            _ => self.misread(name),
        };
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong(&self.name(name), &value, "a number"))?;
        if !(low..=high).contains(&number) || is_above && number == low {
            let expected = if is_above {
                format!("above {low} and at most {high}")
            } else {
                format!("from {low} to {high}")
            };
            return Err(wrong(&self.name(name), &value, expected));
        }
        // What is above zero stays so, however small.
        let least = if is_above && low == 0.0 { f32::MIN_POSITIVE } else { f32::NEG_INFINITY };
        Ok(Some((number as f32).max(least)))
    }

    /// A whole number in its declared range.
    pub(crate) fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        let Takes::Whole(low, high) = self.declared(name).takes else { self.misread(name) };
        match self.take(name) {
            None => Ok(None),
            Some(value) => integer(&self.name(name), &value, low, high).map(Some),
        }
    }

    /// A list. How many items there may be is for the caller to check.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        let Takes::List(..) = self.declared(name).takes else { self.misread(name) };
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.name(name), &other, "a list")),
        }
    }

    /// An object of anything.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        let (Takes::Map | Takes::Schema(_)) = self.declared(name).takes else { self.misread(name) };
        self.taken_object(name)
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

    /// Takes all fields that change nothing, or may not be there.
    pub(crate) fn take_idle(&mut self) -> Result<(), ApiError> {
        for Field { name, takes, .. } in self.declared.fields() {
            match *takes {
                Takes::Only(values, reason) => {
                    self.refuse_unless(name, reason, |value| values.iter().any(|text| only(text) == *value))?;
                }
                Takes::Never(reason) => self.refuse_unless(name, reason, |_| false)?,
                Takes::Unread(Takes::Text) => match self.take(name) {
                    Some(value) if !value.is_string() => {
                        return Err(wrong(&self.name(name), &value, "a string"));
                    }
                    _ => {}
                },
                Takes::Unread(Takes::Flag) => drop(self.typed(name, "true or false", Value::as_bool)?),
                Takes::Unread(Takes::Map) => drop(self.taken_object(name)?),
                Takes::Unread(Takes::Whole(low, high)) => {
                    if let Some(value) = self.take(name) {
                        integer(&self.name(name), &value, *low, *high)?;
                    }
                }
                // Of any kind.
                Takes::Unread(Takes::Schema(_)) => drop(self.take(name)),
                Takes::Unread(_) => self.misread(name),
                _ => {}
            }
        }
        Ok(())
    }

    /// Ends the reading: a field that is left over has no meaning here.
    pub(crate) fn finish(mut self) -> Result<(), ApiError> {
        self.take_idle()?;
        self.map.retain(|_, value| !value.is_null());
        match self.map.keys().next() {
            Some(name) if self.declared.field(name).is_some() => self.misread(name),
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

    fn declared(&self, name: &str) -> &'static Field {
        match self.declared.field(name) {
            Some(field) => field,
            None => self.misread(name),
        }
    }

    fn misread(&self, name: &str) -> ! {
        panic!("{} is not read as {} declares it", self.name(name), self.declared.name);
    }

    fn taken_object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong(&self.name(name), &other, "an object")),
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

    use crate::declare::{field, idle};

    const INNER: Object = Object { name: "Inner", groups: &[&[field("d", Takes::Flag, "")]] };
    const OUTER: Object = Object {
        name: "Outer",
        groups: &[
            &[field("a", Takes::Number(0.0, 2.0), ""), field("p", Takes::NumberAbove(0.0, 1.0), "")],
            &[field("n", Takes::Whole(1, 8), ""), field("e", Takes::Whole(0, i64::MAX), "")],
            &[
                field("s", Takes::Text, ""),
                field("f", Takes::Flag, ""),
                field("b", Takes::Object(&INNER), ""),
            ],
            &[idle("only", Takes::Only(&["false", "[1]"], "it is off")), idle("not", Takes::Never("no"))],
            &[field("u", Takes::Unread(&Takes::Text), "")],
        ],
    };

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes(), &OUTER).unwrap()
    }

    fn message(text: &str, read: impl FnOnce(&mut Fields) -> Result<(), ApiError>) -> String {
        read(&mut fields(text)).unwrap_err().to_string()
    }

    #[test]
    fn types_are_checked_and_errors_name_the_field_the_finding_and_the_wish() {
        assert_eq!(
            message(r#"{"n":"x"}"#, |f| f.integer("n").map(drop)),
            "'n' is the string \"x\"; it must be a whole number from 1 to 8"
        );
        assert_eq!(
            message(r#"{"n":9}"#, |f| f.integer("n").map(drop)),
            "'n' is 9; it must be a whole number from 1 to 8"
        );
        assert!(message(r#"{"n":1.5}"#, |f| f.integer("n").map(drop)).contains("1.5"));
        assert!(message(r#"{"e":1e30}"#, |f| f.integer("e").map(drop)).contains("1e+30"));
        assert!(message(r#"{"a":[1,2]}"#, |f| f.number("a").map(drop)).contains("a list of 2"));
        assert!(message(r#"{"s":{}}"#, |f| f.string("s").map(drop)).contains("an object of 0 fields"));
        assert!(message(r#"{"f":1}"#, |f| f.boolean("f").map(drop)).contains("true or false"));
        let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(1000));
        assert!(message(&long, |f| f.number("a").map(drop)).contains("a string of 1000 bytes"));
    }

    #[test]
    fn numbers_are_held_to_their_ranges_before_they_are_rounded() {
        let refused = |text: &str, name| message(text, |f| f.number(name).map(drop));
        assert_eq!(refused(r#"{"a":2.5}"#, "a"), "'a' is 2.5; it must be from 0 to 2");
        // The next f32 is 2.
        assert!(refused(r#"{"a":2.00000001}"#, "a").contains("2.00000001"));
        assert!(refused(r#"{"a":-1e-300}"#, "a").contains("from 0 to 2"));
        assert_eq!(refused(r#"{"p":0}"#, "p"), "'p' is 0; it must be above 0 and at most 1");
        assert_eq!(fields(r#"{"p":1e-300}"#).number("p").unwrap(), Some(f32::MIN_POSITIVE));
        assert_eq!(fields(r#"{"a":2}"#).number("a").unwrap(), Some(2.0));
    }

    #[test]
    fn null_is_absent_and_leftovers_are_named_with_their_place() {
        let mut top = fields(r#"{"a":null,"b":{"c":1,"d":null},"e":3.0}"#);
        assert_eq!(top.number("a").unwrap(), None);
        assert_eq!(top.integer("e").unwrap(), Some(3));
        let mut inner = top.inner("b").unwrap().unwrap();
        assert!(inner.take("d").is_none());
        assert_eq!(inner.finish().unwrap_err().to_string(), "unknown field 'b.c'");
        assert!(top.finish().is_ok());
        assert!(fields(r#"{"x":null}"#).finish().is_ok());
    }

    #[test]
    fn what_changes_nothing_is_taken_with_the_declared_values_only() {
        let finish = |text: &str| fields(text).finish().map_err(|error| error.to_string());
        for text in [r#"{"only":false,"not":null,"u":"x"}"#, r#"{"only":[1]}"#, "{}"] {
            assert_eq!(finish(text), Ok(()), "{text}");
        }
        let refused = finish(r#"{"only":true}"#).unwrap_err();
        assert_eq!(refused, "'only' is not supported by this server (it is off); leave it out");
        assert!(finish(r#"{"not":0}"#).unwrap_err().contains("(no)"));
        assert!(finish(r#"{"u":0}"#).unwrap_err().contains("a string"));
    }

    #[test]
    #[should_panic(expected = "x is not read as Outer declares it")]
    fn a_field_that_is_not_declared_can_not_be_read() {
        fields("{}").take("x");
    }

    #[test]
    #[should_panic(expected = "n is not read as Outer declares it")]
    fn a_field_can_not_be_read_as_another_type() {
        let _ = fields("{}").string("n");
    }

    #[test]
    #[should_panic(expected = "n is not read as Outer declares it")]
    fn a_declared_field_can_not_stay_unread() {
        let _ = fields(r#"{"n":3}"#).finish();
    }

    #[test]
    fn what_is_not_a_json_object_is_refused_with_its_place() {
        let message = |body: &[u8]| Fields::parse(body, &OUTER).err().unwrap().to_string();
        assert!(message(b"{\"a\":").contains("line 1"));
        for (body, found) in [
            (&b"[1]"[..], "a list of 1"),
            (b"\"x\"", "the string \"x\""),
            (b" 5 ", "5"),
            (b"null", "null"),
            (b"true", "true"),
            (b"", "empty"),
            (b" \n", "empty"),
        ] {
            assert_eq!(message(body), format!("the body is {found}; it must be a JSON object"));
        }
        assert!(message(b"{\"a\":1e999}").contains("number out of range"));
        assert!(message(b"{\"a\":NaN}").contains("JSON"));
        assert!(message(b"{\"a\":\"\xff\"}").contains("offset 6"));
        assert!(message(&[b'['; 1000]).contains("recursion limit"));
    }
}
