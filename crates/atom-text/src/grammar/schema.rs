//! What is wrong with a JSON schema before anybody compiles it.

use serde_json::Value;

/// Where llguidance takes options inside of a schema.
pub(super) const OPTIONS: &str = "x-guidance";

/// Refuses what llguidance would act on and a client can't mean, what is nested too deep, and schemas that
/// no finite document satisfies, for which a model would write until its tokens are used up.
pub(crate) fn check(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Object(object) if object.contains_key(OPTIONS) => {
            return Err(format!("'{OPTIONS}' is not a keyword of JSON schemas"));
        }
        Value::Object(_) | Value::Bool(_) => {}
        _ => return Err("a schema is an object, true or false".into()),
    }
    if depth(schema) > DEPTH_MAX {
        return Err(format!(
            "it is nested too deep: {} levels, at most {DEPTH_MAX} are taken",
            depth(schema)
        ));
    }
    let mut search = Search { root: schema, entered: Vec::new(), steps: 0 };
    if search.ends(schema) { Ok(()) } else { Err(NO_END.into()) }
}

/// Looks for a finite document. A reference that is met within itself has none on that way.
struct Search<'a> {
    root: &'a Value,
    entered: Vec<&'a str>,
    steps: usize,
}

impl<'a> Search<'a> {
    fn ends(&mut self, schema: &'a Value) -> bool {
        self.steps += 1;
        let Some(object) = schema.as_object() else { return true };
        if self.steps > STEPS_MAX {
            // Not proven; what it costs is bounded by the request's tokens.
            return true;
        }
        let list = |key: &str| object.get(key).and_then(Value::as_array);
        let any = |this: &mut Self, key| list(key).is_none_or(|options| options.iter().any(|o| this.ends(o)));
        if !any(self, "anyOf") || !any(self, "oneOf") {
            return false;
        }
        if !list("allOf").is_none_or(|parts| parts.iter().all(|part| self.ends(part))) {
            return false;
        }
        if let Some(reference) = object.get("$ref").and_then(Value::as_str)
            && !self.reference_ends(reference)
        {
            return false;
        }
        let properties = object.get("properties").and_then(Value::as_object);
        let required = list("required").into_iter().flatten().filter_map(Value::as_str);
        let mut members = required.filter_map(|name| properties?.get(name));
        if !may_be_other_than(object.get("type"), "object") && !members.all(|member| self.ends(member)) {
            return false;
        }
        let is_filled = object.get("minItems").and_then(Value::as_u64).is_some_and(|least| least > 0);
        let items = object.get("items").filter(|_| is_filled && list("prefixItems").is_none());
        may_be_other_than(object.get("type"), "array") || items.is_none_or(|items| self.ends(items))
    }

    fn reference_ends(&mut self, reference: &'a str) -> bool {
        // What can't be followed is refused by whoever compiles it.
        let Some(pointer) = reference.strip_prefix('#') else { return true };
        let Some(target) = self.root.pointer(pointer.strip_suffix('/').unwrap_or(pointer)) else {
            return true;
        };
        if self.entered.contains(&reference) {
            return false;
        }
        self.entered.push(reference);
        let ends = self.ends(target);
        self.entered.pop();
        ends
    }
}

/// True if a value of another type satisfies the schema too.
fn may_be_other_than(kind: Option<&Value>, than: &str) -> bool {
    kind.is_none_or(|kind| kind != than)
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Levels of objects and lists; a body as a whole may have 128.
const DEPTH_MAX: usize = 100;

/// Schemas looked at. Those with many references to each other would take a search for ever.
const STEPS_MAX: usize = 20_000;

const NO_END: &str = "no finite document satisfies it: what it requires refers back to itself";
