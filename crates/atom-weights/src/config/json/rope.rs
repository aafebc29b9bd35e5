//! The rotary part of config.json.

use super::keys::Keys;
use crate::config::{Architecture, Rope, RopeLayout, RopeScaling};
use crate::error::WeightsError;
use serde_json::Value;

/// Reads `rope_parameters`, or `rope_theta` and `rope_scaling`, or both where they agree.
pub(super) fn read(
    keys: &Keys<'_>,
    architecture: Architecture,
    head_dim: usize,
) -> Result<Rope, WeightsError> {
    let inner = [keys.object("rope_parameters")?, keys.object("rope_scaling")?];
    let places: Vec<&Keys<'_>> = inner.iter().flatten().chain([keys]).collect();

    let theta = match agreed(&places, "rope_theta", 1.0, THETA_MAX)? {
        Some(theta) => theta,
        // Llama's first checkpoints do not state it; it was a constant of the code then.
        None if architecture == Architecture::Llama => 10_000.0,
        None => return Err(keys.wrong("rope_theta", "is missing")),
    };
    let dim = rotated(keys, &places, architecture, head_dim)?;

    let mut scaling = None;
    for place in inner.iter().flatten() {
        let found = scaling_of(place)?;
        if scaling.as_ref().is_some_and(|other| *other != found) {
            return Err(keys.wrong("rope_scaling", "contradicts rope_parameters"));
        }
        scaling = Some(found);
    }
    Ok(Rope { theta, dim, layout: RopeLayout::Halves, scaling: scaling.unwrap_or(RopeScaling::None) })
}

/// Of a head's elements, how many rotate: a factor, whose product with them is rounded down as the
/// reference does, or MiniMax's number.
fn rotated(
    keys: &Keys<'_>,
    places: &[&Keys<'_>],
    architecture: Architecture,
    head_dim: usize,
) -> Result<usize, WeightsError> {
    const NUMBER: &str = "rotary_dim";
    let part = agreed(places, "partial_rotary_factor", 1e-6, 1.0)?;
    let product = |part: f64| (head_dim as f64 * part) as usize;
    if architecture == Architecture::MiniMaxM2 && keys.value(NUMBER).is_some() {
        let number = keys.count(NUMBER, head_dim)?;
        return match part {
            Some(part) if product(part) != number => {
                let problem = format!(
                    "is {number}, but partial_rotary_factor = {part} of a head's {head_dim} is {}",
                    product(part)
                );
                Err(keys.wrong(NUMBER, problem))
            }
            _ => Ok(number),
        };
    }
    let default = if architecture == Architecture::Glm4Moe { 0.5 } else { 1.0 };
    Ok(product(part.unwrap_or(default)))
}

/// The value of a key that may stand in several places, which must not disagree.
fn agreed(places: &[&Keys<'_>], key: &str, low: f64, high: f64) -> Result<Option<f64>, WeightsError> {
    let mut found: Option<(f64, String)> = None;
    for place in places.iter().filter(|place| place.value(key).is_some()) {
        let value = place.within(key, low, high)?;
        match &found {
            Some((other, path)) if *other != value => {
                return Err(place.wrong(key, format!("is {value}, but {path} is {other}")));
            }
            _ => found = Some((value, place.path(key))),
        }
    }
    Ok(found.map(|(value, _)| value))
}

fn scaling_of(keys: &Keys<'_>) -> Result<RopeScaling, WeightsError> {
    if let Some((name, _)) = keys.values().find(|(_, value)| matches!(value, Value::Object(_))) {
        let what = format!("rotary parameters per kind of layer ({})", keys.path(name));
        return Err(keys.unsupported(what, "one set for all layers is"));
    }
    let kind = match (keys.text("rope_type")?, keys.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            return Err(keys.wrong("rope_type", format!("is {new}, but type is {old}")));
        }
        (Some(kind), _) | (None, Some(kind)) => kind,
        // Only a theta, say.
        (None, None) if keys.value("factor").is_none() => "default",
        (None, None) => return Err(keys.wrong("rope_type", "is missing, though there is a factor")),
    };
    let factor = || keys.within("factor", 1.0, FACTOR_MAX);
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
        "llama3" => {
            let low_freq_factor = keys.within("low_freq_factor", 1e-6, FACTOR_MAX)?;
            let high_freq_factor = keys.within("high_freq_factor", 1e-6, FACTOR_MAX)?;
            if high_freq_factor <= low_freq_factor {
                let problem =
                    format!("is {high_freq_factor}; it must be above low_freq_factor = {low_freq_factor}");
                return Err(keys.wrong("high_freq_factor", problem));
            }
            let original = keys.within("original_max_position_embeddings", 1.0, POSITIONS_MAX)?;
            Ok(RopeScaling::Llama3 { factor: factor()?, low_freq_factor, high_freq_factor, original })
        }
        other => Err(keys.unsupported(format!("rope type {other}"), "default, linear and llama3 are")),
    }
}

/// Published bases reach 1e7 or so.
const THETA_MAX: f64 = 1e12;
/// Published factors reach 64.
const FACTOR_MAX: f64 = 1e6;
const POSITIONS_MAX: f64 = crate::config::POSITIONS_MAX as f64;
