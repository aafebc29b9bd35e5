//! JSON in and out of templates, as Python's `json` writes it.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::Value as Json;

/// A JSON value for the template engine. Objects keep their order.
pub(super) fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(signed), ..) => Value::from(signed),
            (None, Some(unsigned), _) => Value::from(unsigned),
            (None, None, float) => Value::from(float.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(to_value).collect(),
        Json::Object(entries) => {
            Value::from_pairs(entries.iter().map(|(key, item)| (key.as_str(), to_value(item))))
        }
    }
}

/// The filter `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`, which
/// transformers puts in place of Jinja's own: nothing is escaped for HTML.
pub(super) fn tojson(state: &State, value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width)) if width <= INDENT_MAX => " ".repeat(width),
            _ => return Err(invalid(format!("tojson: indent is {indent}; a string or 0 to {INDENT_MAX}"))),
        }),
    };
    let separators = match options.get::<Option<Value>>("separators")? {
        Some(pair) if !pair.is_none() => {
            let parts: Vec<Value> = pair.try_iter()?.collect();
            match parts.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
                [Some(item), Some(key)] => (item.to_owned(), key.to_owned()),
                _ => return Err(invalid("tojson: separators must be two strings".into())),
            }
        }
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        state,
        out: String::new(),
        charged: 0,
        indent,
        separators,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    writer.value(&value, 0)?;
    Ok(Value::from(writer.out))
}

/// Spaces of one level. Python sets no bound; this one keeps a template from padding by the megabyte.
const INDENT_MAX: usize = 64;

/// Levels of nesting. Requests are parsed to 128 levels; a template may wrap them in a few more. Without
/// a bound, a namespace that holds itself would overflow the stack.
const DEPTH_MAX: usize = 160;

struct Writer<'a> {
    state: &'a State<'a, 'a>,
    out: String,
    /// Bytes of `out` that were paid for.
    charged: usize,
    indent: Option<String>,
    /// After an item, and after a key.
    separators: (String, String),
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid(format!("tojson: the value is nested deeper than {DEPTH_MAX} levels")));
        }
        // Paid as it grows: a value that holds itself many times over is small in memory and huge here.
        let grown = self.out.len() - self.charged;
        self.state.consume_fuel(1 + (grown / BYTES_PER_FUEL) as u64)?;
        self.charged += grown / BYTES_PER_FUEL * BYTES_PER_FUEL;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(['[', ']'], depth, &items, |writer, item| writer.value(item, depth + 1))?;
            }
            ValueKind::Map => self.map(value, depth)?,
            other => return Err(invalid(format!("tojson: {other} can't be written as JSON"))),
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let text = match key.kind() {
                ValueKind::String => key.to_string(),
                ValueKind::None => "null".into(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
                ValueKind::Number => key.to_string(),
                other => return Err(invalid(format!("tojson: {other} can't be a key"))),
            };
            entries.push((text, value.get_item(&key)?));
        }
        if self.sort_keys {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.container(['{', '}'], depth, &entries, |writer, (key, item)| {
            writer.string(key);
            writer.out.push_str(&writer.separators.1);
            writer.value(item, depth + 1)
        })
    }

    fn container<T>(
        &mut self,
        [open, close]: [char; 2],
        depth: usize,
        items: &[T],
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.out.push_str(&self.separators.0);
            }
            self.line_break(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line_break(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn number(&mut self, value: &Value) {
        let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
        match float {
            None => self.out.push_str(&value.to_string()),
            Some(float) => self.out.push_str(&python_float(float)),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Writing JSON walks the value, which is slower than copying bytes; the engine's own filter charges alike.
const BYTES_PER_FUEL: usize = 4;

/// A float as Python's `repr` writes it: shortest digits, an exponent outside of `1e-4 .. 1e16`.
fn python_float(float: f64) -> String {
    if float.is_nan() {
        return "NaN".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    // Rust's Debug switches to an exponent at the same places, and writes it without sign and padding.
    let digits = format!("{float:?}");
    match digits.split_once('e') {
        Some((mantissa, exponent)) => {
            let exponent: i32 = exponent.parse().expect("Debug writes a number after its e");
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
        None => digits,
    }
}

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}
