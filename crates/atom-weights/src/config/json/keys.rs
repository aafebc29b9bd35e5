//! Reading keys of a JSON object with errors that say which key, what it holds and what it should.

use crate::error::WeightsError;
use serde_json::{Map, Value};
use std::path::Path;

/// One object of a config.json. A key that holds null counts as absent: both are published.
pub(super) struct Keys<'a> {
    origin: &'a Path,
    prefix: &'static str,
    object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(super) fn top(origin: &'a Path, raw: &'a Value) -> Result<Self, WeightsError> {
        let object = raw
            .as_object()
            .ok_or_else(|| WeightsError::config(origin, "the file", "does not hold a JSON object"))?;
        Ok(Self { origin, prefix: "", object })
    }

    /// The object under `key`, if there is one.
    pub(super) fn object(&self, key: &'static str) -> Result<Option<Self>, WeightsError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { origin: self.origin, prefix: key, object })),
            Some(other) => Err(self.wrong(key, format!("is {other}; an object is expected"))),
        }
    }

    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn values(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.object.iter()
    }

    /// A whole number from 1 to `max`.
    pub(super) fn count(&self, key: &str, max: usize) -> Result<usize, WeightsError> {
        let value = self.value(key).ok_or_else(|| self.wrong(key, "is missing"))?;
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n));
        number
            .ok_or_else(|| self.wrong(key, format!("is {value}; a whole number from 1 to {max} is expected")))
    }

    pub(super) fn count_or(&self, key: &str, default: usize, max: usize) -> Result<usize, WeightsError> {
        if self.value(key).is_some() { self.count(key, max) } else { Ok(default) }
    }

    /// A whole number from 0 to `max`.
    pub(super) fn whole_or(&self, key: &str, default: usize, max: usize) -> Result<usize, WeightsError> {
        let Some(value) = self.value(key) else { return Ok(default) };
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n <= max);
        number
            .ok_or_else(|| self.wrong(key, format!("is {value}; a whole number from 0 to {max} is expected")))
    }

    /// A number from `low` to `high`.
    pub(super) fn within(&self, key: &str, low: f64, high: f64) -> Result<f64, WeightsError> {
        let value = self.value(key).ok_or_else(|| self.wrong(key, "is missing"))?;
        // NaN is in no range.
        let number = value.as_f64().filter(|n| *n >= low && *n <= high);
        number.ok_or_else(|| {
            self.wrong(key, format!("is {value}; a number from {low:e} to {high:e} is expected"))
        })
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, WeightsError> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.wrong(key, format!("is {value}; true or false is expected"))),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, WeightsError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, format!("is {other}; a string is expected"))),
        }
    }

    /// The key as the user finds it: `rope_scaling.factor`.
    pub(super) fn path(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    pub(super) fn wrong(&self, key: &str, problem: impl Into<String>) -> WeightsError {
        WeightsError::config(self.origin, self.path(key), problem)
    }

    pub(super) fn unsupported(&self, what: impl Into<String>, supported: impl Into<String>) -> WeightsError {
        WeightsError::unsupported(self.origin, what, supported)
    }
}
