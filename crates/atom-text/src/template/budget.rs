//! What a rendering may cost, and the operations whose cost the engine learns too late.

use super::TemplateInput;
use minijinja::value::{Kwargs, StringInput};
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::{Map, Value as Json};

/// Work that a rendering may do whatever the request, in units of the template engine: one per instruction
/// and one per 64 bytes made or read. It bounds memory too, to 64 MB.
const FUEL_BASE: u64 = 1_000_000;

/// Work on top of that for each JSON value of the request. Published templates take some 100 a message.
const FUEL_PER_VALUE: u64 = 1_000;

/// Bytes of the request's text that pay for one unit: sixteen copies of it all. Published templates make five.
const BYTES_PER_FUEL: u64 = 4;

/// Characters of one field of a format string.
const WIDTH_MAX: usize = 1_000;

/// The budget of a rendering.
pub(super) fn fuel(input: &TemplateInput) -> u64 {
    let mut fuel = FUEL_BASE;
    let mut pending: Vec<&Json> = [Some(input.messages), input.tools].into_iter().flatten().collect();
    pending.extend(input.kwargs.into_iter().flat_map(Map::values));
    while let Some(value) = pending.pop() {
        fuel += FUEL_PER_VALUE;
        match value {
            Json::String(text) => fuel += text.len() as u64 / BYTES_PER_FUEL,
            Json::Array(items) => pending.extend(items),
            Json::Object(entries) => pending.extend(entries.values()),
            Json::Null | Json::Bool(_) | Json::Number(_) => {}
        }
    }
    fuel
}

/// Methods of Python's strings, lists and dicts.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match (name, value.as_str(), args.first()) {
        ("join", Some(separator), Some(items)) => prepay_join(state, items, separator.len())?,
        ("format", Some(format), _) => check_widths(format)?,
        _ => {}
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// The filter `join`, paid before the text is made.
pub(super) fn join(
    state: &mut State,
    items: &Value,
    separator: Option<StringInput<'_>>,
    attribute: Option<&str>,
    options: Kwargs,
) -> Result<Value, Error> {
    prepay_join(state, items, 0)?;
    minijinja::filters::join(state, items, separator, attribute, options)
}

/// A list may name one long string many times.
fn prepay_join(state: &State, items: &Value, separator_bytes: usize) -> Result<(), Error> {
    let bytes = items.try_iter()?.map(|item| item.as_str().map_or(0, str::len) + separator_bytes);
    state.consume_fuel(bytes.fold(0, usize::saturating_add) as u64 / 64)
}

/// Refuses numbers in a format string that are no width or precision of an honest one.
fn check_widths(format: &str) -> Result<(), Error> {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let is_wide = |digits: &&str| !digits.parse().is_ok_and(|number: usize| number <= WIDTH_MAX);
    match numbers.into_iter().find(is_wide) {
        None => Ok(()),
        Some(digits) => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a format string asks for {digits} characters; at most {WIDTH_MAX} are written"),
        )),
    }
}
