//! What the objects of a body may have, as data. [`Fields`](crate::fields::Fields) reads a body by it: names,
//! types and bounds come from here and from nowhere else, and a field that is not here is refused. The OpenAPI
//! document (`openapi`) is made of the same.
//!
//! JSON Schema can't say all that a parser knows: that a call's answer names the call, or how many bytes a text
//! has. What is declared must hold, but isn't always enough.

use serde_json::{Map, Value, json};

/// An object.
#[derive(Debug)]
pub(crate) struct Object {
    /// As a component of the document.
    pub(crate) name: &'static str,
    /// Its fields; several objects may have a group in common.
    pub(crate) groups: &'static [&'static [Field]],
}

/// A field. Null is the same as absent.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) takes: Takes,
    /// What it does, for readers of the document.
    about: &'static str,
    /// Without it the object is refused.
    is_needed: bool,
}

/// Values of a field, or of an item of a list.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Takes {
    Flag,
    Text,
    /// A text of `min` to `max` bytes. The document says characters, which are never more.
    Short(usize, usize),
    /// A text that a regular expression describes.
    Pattern(&'static str),
    /// One of these texts.
    Word(&'static [&'static str]),
    /// A whole number, both bounds included.
    Whole(i64, i64),
    /// A token of the vocabulary.
    Token,
    /// A number, both bounds included.
    Number(f64, f64),
    /// A number above the first and up to the second.
    NumberAbove(f64, f64),
    /// Any object.
    Map,
    /// One of this kind.
    Object(&'static Object),
    /// One of this kind, of whose fields one at least says something.
    Filled(&'static Object),
    /// One of one of these kinds. Read by hand.
    OneOf(&'static [&'static Object]),
    /// The same, under a name of its own in the document. For kinds that are made of each other: where each of them has
    /// the others by their own names, who follows references has more ways to go than there is memory.
    Named(&'static str, &'static [&'static Object]),
    /// Items, at least and at most so many.
    List(&'static Takes, usize, usize),
    /// Any of these. Read by hand.
    Either(&'static [Takes]),
    /// What the JSON schema says that this text holds. Read by hand.
    Schema(&'static str),
    /// Checked, and then of no consequence.
    Unread(&'static Takes),
    /// Nothing but these JSON values, since they ask for what happens anyway; and why.
    Only(&'static [&'static str], &'static str),
    /// Nothing; and why.
    Never(&'static str),
}

/// A field that may be absent.
pub(crate) const fn field(name: &'static str, takes: Takes, about: &'static str) -> Field {
    Field { name, takes, about, is_needed: false }
}

/// A field that must be there.
pub(crate) const fn needed(name: &'static str, takes: Takes, about: &'static str) -> Field {
    Field { name, takes, about, is_needed: true }
}

/// A field that is taken with some values only, or never: `takes` says why.
pub(crate) const fn idle(name: &'static str, takes: Takes) -> Field {
    Field { name, takes, about: "", is_needed: false }
}

impl Object {
    pub(crate) fn fields(&self) -> impl Iterator<Item = &'static Field> {
        self.groups.iter().copied().flatten()
    }

    pub(crate) fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields().find(|field| field.name == name)
    }
}

/// The body of an order, which has no fields.
pub(crate) const NOTHING: Object = Object { name: "Nothing", groups: &[] };

/// JSON schemas of declared objects. The named ones are components of a document, in the order in which they
/// were met.
pub(crate) struct Schemas {
    pub(crate) components: Map<String, Value>,
    /// Tokens that the model has.
    vocab: usize,
}

impl Schemas {
    pub(crate) fn new(vocab: usize) -> Self {
        Self { components: Map::new(), vocab }
    }

    /// A reference to the object's component, which is made when it is first asked for.
    pub(crate) fn object(&mut self, object: &'static Object) -> Value {
        if !self.components.contains_key(object.name) {
            self.components.insert(object.name.into(), Value::Null);
            let schema = self.of_object(object);
            self.components.insert(object.name.into(), schema);
        }
        json!({"$ref": format!("#/components/schemas/{}", object.name)})
    }

    /// A reference to the component that says that it is one of these kinds.
    fn named(&mut self, name: &'static str, kinds: &'static [&'static Object]) -> Value {
        if !self.components.contains_key(name) {
            self.components.insert(name.into(), Value::Null);
            let schema = self.one_of(kinds);
            self.components.insert(name.into(), schema);
        }
        json!({"$ref": format!("#/components/schemas/{name}")})
    }

    fn one_of(&mut self, kinds: &'static [&'static Object]) -> Value {
        json!({"anyOf": kinds.iter().map(|kind| self.object(kind)).collect::<Vec<_>>()})
    }

    fn of_object(&mut self, object: &'static Object) -> Value {
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for field in object.fields() {
            let Some(mut schema) = self.takes(&field.takes) else { continue };
            if field.is_needed {
                required.push(Value::from(field.name));
            } else {
                schema = or_null(schema);
            }
            let why = match field.takes {
                Takes::Only(_, why) => format!("Nothing else is taken: {why}."),
                _ => String::new(),
            };
            let about = if field.about.is_empty() { why } else { field.about.into() };
            if !about.is_empty() {
                schema["description"] = about.into();
            }
            properties.insert(field.name.into(), schema);
        }
        let mut schema = json!({"type": "object", "properties": properties});
        if !required.is_empty() {
            schema["required"] = required.into();
        }
        // Null is the same as absent, for fields that nobody knows too.
        schema["additionalProperties"] = json!({"type": "null"});
        schema
    }

    /// `None`: no value.
    fn takes(&mut self, takes: &'static Takes) -> Option<Value> {
        Some(match *takes {
            Takes::Flag => json!({"type": "boolean"}),
            Takes::Text => json!({"type": "string"}),
            Takes::Short(min, max) => {
                let mut schema = json!({"type": "string", "minLength": min});
                if max < usize::MAX {
                    schema["maxLength"] = max.into();
                }
                schema
            }
            Takes::Pattern(pattern) => json!({"type": "string", "pattern": pattern}),
            Takes::Word(words) => json!({"type": "string", "enum": words}),
            Takes::Whole(low, high) => json!({"type": "integer", "minimum": low, "maximum": high}),
            Takes::Token => json!({"type": "integer", "minimum": 0, "maximum": self.vocab - 1}),
            Takes::Number(low, high) => json!({"type": "number", "minimum": low, "maximum": high}),
            Takes::NumberAbove(low, high) => {
                json!({"type": "number", "exclusiveMinimum": low, "maximum": high})
            }
            Takes::Map => json!({"type": "object"}),
            Takes::Object(object) => self.object(object),
            Takes::Filled(object) => {
                let reference = self.object(object);
                self.components[object.name]["minProperties"] = 1.into();
                reference
            }
            Takes::OneOf(kinds) => self.one_of(kinds),
            Takes::Named(name, kinds) => self.named(name, kinds),
            Takes::List(items, min, max) => {
                let mut schema = json!({"type": "array", "items": self.takes(items)?});
                if min > 0 {
                    schema["minItems"] = min.into();
                }
                if max < usize::MAX {
                    schema["maxItems"] = max.into();
                }
                schema
            }
            Takes::Either(all) => {
                json!({"anyOf": all.iter().filter_map(|takes| self.takes(takes)).collect::<Vec<_>>()})
            }
            Takes::Schema(text) => serde_json::from_str(text).expect("declared schemas are JSON"),
            Takes::Unread(takes) => return self.takes(takes),
            Takes::Only(texts, _) => json!({"enum": texts.iter().map(|text| only(text)).collect::<Vec<_>>()}),
            Takes::Never(_) => return None,
        })
    }
}

/// A value of [`Takes::Only`].
pub(crate) fn only(text: &str) -> Value {
    serde_json::from_str(text).expect("declared values are JSON")
}

/// The same schema, which null fits too.
pub(crate) fn or_null(mut schema: Value) -> Value {
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.push(Value::Null);
    }
    if schema.get("$ref").is_some() {
        return json!({"anyOf": [schema, {"type": "null"}]});
    }
    match schema.get_mut("type") {
        Some(Value::Array(kinds)) => kinds.push("null".into()),
        Some(kind) => *kind = json!([kind.take(), "null"]),
        None => {}
    }
    if let Some(all) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        all.push(json!({"type": "null"}));
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_becomes_a_schema_that_says_the_same() {
        const INNER: Object = Object { name: "Inner", groups: &[&[needed("a", Takes::Flag, "A.")]] };
        const FULL: Object = Object { name: "Full", groups: &[&[field("t", Takes::Text, "")]] };
        static KINDS: [&Object; 2] = [&INNER, &NESTED];
        static NESTED: Object =
            Object { name: "Nested", groups: &[&[needed("of", Takes::Named("Kind", &KINDS), "")]] };
        const OUTER: Object = Object {
            name: "Outer",
            groups: &[
                &[field("n", Takes::Whole(1, 8), "N."), field("inner", Takes::Object(&INNER), "")],
                &[idle("off", Takes::Only(&["false"], "it is off")), idle("never", Takes::Never("no"))],
                &[field("w", Takes::Either(&[Takes::Word(&["x"]), Takes::List(&Takes::Token, 1, 2)]), "")],
                &[
                    field("full", Takes::Filled(&FULL), ""),
                    field("kind", Takes::Named("Kind", &KINDS), "One."),
                ],
            ],
        };
        let mut schemas = Schemas::new(100);
        assert_eq!(schemas.object(&OUTER), json!({"$ref": "#/components/schemas/Outer"}));
        let expected = json!({
            "Outer": {
                "type": "object",
                "properties": {
                    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 8, "description": "N."},
                    "inner": {"anyOf": [{"$ref": "#/components/schemas/Inner"}, {"type": "null"}]},
                    "off": {"enum": [false, null], "description": "Nothing else is taken: it is off."},
                    "w": {"anyOf": [
                        {"type": "string", "enum": ["x"]},
                        {"type": "array", "minItems": 1, "maxItems": 2,
                         "items": {"type": "integer", "minimum": 0, "maximum": 99}},
                        {"type": "null"},
                    ]},
                    "full": {"anyOf": [{"$ref": "#/components/schemas/Full"}, {"type": "null"}]},
                    "kind": {
                        "anyOf": [{"$ref": "#/components/schemas/Kind"}, {"type": "null"}],
                        "description": "One.",
                    },
                },
                "additionalProperties": {"type": "null"},
            },
            "Full": {
                "type": "object",
                "properties": {"t": {"type": ["string", "null"]}},
                "minProperties": 1,
                "additionalProperties": {"type": "null"},
            },
            "Kind": {
                "anyOf": [{"$ref": "#/components/schemas/Inner"}, {"$ref": "#/components/schemas/Nested"}],
            },
            "Nested": {
                "type": "object",
                "properties": {"of": {"$ref": "#/components/schemas/Kind"}},
                "required": ["of"],
                "additionalProperties": {"type": "null"},
            },
            "Inner": {
                "type": "object",
                "properties": {"a": {"type": "boolean", "description": "A."}},
                "required": ["a"],
                "additionalProperties": {"type": "null"},
            },
        });
        assert_eq!(Value::Object(schemas.components), expected);
    }
}
