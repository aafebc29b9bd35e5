//! JSON that says each thing once.
//!
//! Of two fields with the same name, parsers take the first, the last or either: what a gateway checked need
//! not be what a server does. So a name that comes twice is refused, at any depth.

use crate::error::ApiError;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::{Cell, RefCell};
use std::fmt;

/// Reads a JSON text, at most 128 levels deep.
pub(crate) fn parse(text: &str) -> Result<Value, ApiError> {
    read(text, &Place::Top).map_err(|fault| match fault {
        Fault::Twice(name) => ApiError::DuplicateField { name },
        Fault::NotJson(error) => ApiError::NotJson { reason: error.to_string() },
    })
}

/// Reads the JSON text that is the value of the field `name`, in the same way; `expected` says what it should be.
pub(crate) fn parse_field(name: &str, text: &str, expected: &str) -> Result<Value, ApiError> {
    read(text, &Place::Within(name)).map_err(|fault| match fault {
        Fault::Twice(name) => ApiError::DuplicateField { name },
        Fault::NotJson(error) => ApiError::BadField {
            name: name.to_owned(),
            found: format!("a text of {} bytes that is not JSON ({error})", text.len()),
            expected: expected.into(),
        },
    })
}

/// What is wrong with a text.
enum Fault {
    /// The place of a name that came twice.
    Twice(String),
    NotJson(serde_json::Error),
}

fn read(text: &str, place: &Place<'_>) -> Result<Value, Fault> {
    let twice = RefCell::new(None);
    let weight = Cell::new(0);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Strict { place, twice: &twice, weight: &weight }
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| twice.take().map_or(Fault::NotJson(error), Fault::Twice))
}

/// Where a value sits.
enum Place<'a> {
    Top,
    /// In the text of this field, whose name is one of ours.
    Within(&'a str),
    Field(&'a Place<'a>, &'a str),
    Item(&'a Place<'a>, usize),
}

/// Reads one value.
#[derive(Clone, Copy)]
struct Strict<'a> {
    place: &'a Place<'a>,
    /// The first name that came twice, as a client would spell its place.
    twice: &'a RefCell<Option<String>>,
    /// Of all values so far, see [`WEIGHT_MAX`].
    weight: &'a Cell<usize>,
}

impl Strict<'_> {
    fn at<'b>(&'b self, place: &'b Place<'b>) -> Strict<'b> {
        Strict { place, twice: self.twice, weight: self.weight }
    }

    fn weigh<E: de::Error>(&self, more: usize) -> Result<(), E> {
        self.weight.set(self.weight.get() + more);
        if self.weight.get() > WEIGHT_MAX {
            return Err(E::custom(format!(
                "it has more values than are taken apart: numbers and texts count 1, lists and objects \
                 {LIST_WEIGHT}, all together at most {WEIGHT_MAX}"
            )));
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.weigh(1)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Value, E> {
        Number::from_f64(number).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(Value::String(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        self.weigh(LIST_WEIGHT - 1)?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self.at(&Place::Item(self.place, list.len())))? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        self.weigh(LIST_WEIGHT - 1)?;
        let mut map = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let place = Place::Field(self.place, &name);
            if map.contains_key(&name) {
                let spelled = place.to_string();
                let error = de::Error::custom(format!("'{spelled}' comes twice"));
                *self.twice.borrow_mut() = Some(spelled);
                return Err(error);
            }
            let value = fields.next_value_seed(self.at(&place))?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // At most as deep as the parser goes.
        match self {
            Self::Top => Ok(()),
            Self::Within(name) => f.write_str(name),
            Self::Field(Place::Top, name) => f.write_str(&shown(name)),
            Self::Field(parent, name) => write!(f, "{parent}.{}", shown(name)),
            Self::Item(parent, at) => write!(f, "{parent}[{at}]"),
        }
    }
}

/// An error message is no place for a client's kilobytes.
fn shown(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

const NAME_CHARS_MAX: usize = 64;

/// A value takes some 72 bytes, whatever it took in the body: two bytes can be one. So this is some 300 MB, and
/// more than any prompt as a list of tokens.
const WEIGHT_MAX: usize = 4 << 20;

/// A list of one has room for four.
const LIST_WEIGHT: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_body_does_not_become_gigabytes() {
        let lists = |count: usize| format!("[{}0]", "[0],".repeat(count));
        assert!(parse(&lists(WEIGHT_MAX / 6 - 2)).is_ok());
        let refused = parse(&lists(WEIGHT_MAX / 6 + 2)).unwrap_err().to_string();
        assert!(refused.contains("4194304"), "{refused}");
        let numbers = format!("[{}0]", "0,".repeat(WEIGHT_MAX));
        assert!(parse(&numbers).is_err());
    }

    #[test]
    fn it_reads_what_the_plain_parser_reads() {
        let texts = [
            "null",
            "true",
            "-5",
            "18446744073709551615",
            "1.5e-3",
            "1e400",
            "\"a\\u0000\\ud83e\\udd80\"",
            "\"\\ud800\"",
            "[]",
            "[1,[2,{}],{\"a\":[{\"a\":1}],\"b\":{\"a\":2}}]",
            "{\"\":1,\" \":2}",
            "{\"a\":1,}",
            "[1,]",
            "{\"a\":1} x",
            "{\"a\" 1}",
            "{\"a\":01}",
            "nul",
            "",
            "NaN",
        ];
        for text in texts {
            let plain = serde_json::from_str::<Value>(text);
            match (parse(text), plain) {
                (Ok(ours), Ok(plain)) => assert_eq!(ours, plain, "{text}"),
                (Err(ApiError::NotJson { reason }), Err(plain)) => {
                    assert_eq!(reason, plain.to_string(), "{text}")
                }
                (ours, plain) => panic!("{text}: {ours:?}, not {plain:?}"),
            }
        }
        for depth in [127, 128, 100_000] {
            let text = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
            assert_eq!(parse(&text).is_ok(), serde_json::from_str::<Value>(&text).is_ok(), "{depth} levels");
        }
    }

    #[test]
    fn a_name_that_comes_twice_is_told_with_its_place() {
        let cases = [
            (r#"{"a":1,"a":1}"#, "a"),
            (r#"{"a":1,"b":2,"\u0061":null}"#, "a"),
            (r#"{"messages":[{"role":"user"},{"role":"user","role":"system"}]}"#, "messages[1].role"),
            (r#"{"x":{"y":[[{"z":1,"z":2}]]}}"#, "x.y[0][0].z"),
            (r#"[{"":1,"":2}]"#, "[0]."),
        ];
        for (text, place) in cases {
            match parse(text) {
                Err(ApiError::DuplicateField { name }) => assert_eq!(name, place, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
        let long = format!("{{\"{0}\":1,\"{0}\":2}}", "x".repeat(10_000));
        assert!(parse(&long).unwrap_err().to_string().len() < 200);
    }
}
