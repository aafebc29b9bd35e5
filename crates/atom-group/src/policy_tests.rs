//! The knobs, as users set them.

use super::*;
use std::collections::BTreeMap;

fn parse(set: &[(&str, &str)]) -> Result<Option<Alignment>, PolicyError> {
    let set: BTreeMap<_, _> = set.iter().copied().collect();
    Alignment::parse(|name| set.get(name).map(|&text| text.to_owned()))
}

#[test]
fn unset_and_empty_variables_have_their_defaults() {
    assert_eq!(parse(&[]), Ok(Some(Alignment::default())));
    assert_eq!(parse(&[(QUEUE, " "), (ENABLE, ""), (KV_LOW, "")]), Ok(Some(Alignment::default())));
}

#[test]
fn it_is_switched_on_and_off_and_nothing_else() {
    for (words, on) in
        [(["0", "off", "false", "no", "OFF"], false), (["1", "on", "true", "yes", "True"], true)]
    {
        for text in words {
            assert_eq!(parse(&[(ENABLE, text)]).unwrap().is_some(), on, "{text}");
        }
    }
    assert_eq!(parse(&[(ENABLE, "maybe")]), Err(PolicyError::Switch { text: "maybe".into() }));
}

#[test]
fn every_variable_reaches_its_knob() {
    let all = [
        (TARGET_FILL, "0.85"),
        (HOLD, "30"),
        (PARTIAL, "0"),
        (STALL, "5"),
        (KV_HIGH, "0.95"),
        (KV_LOW, "0.2"),
        (QUEUE, "1500"),
    ];
    let expected = Alignment {
        target_fill_per_mille: 850,
        hold_steps_max: 30,
        partial_hold_steps_max: 0,
        stall_steps: 5,
        kv_high_per_mille: Some(950),
        kv_low_per_mille: Some(200),
        queue_ms_max: Some(1500),
    };
    assert_eq!(parse(&all), Ok(Some(expected)));
    // Each makes a difference to the words that lanes compare.
    let words = |alignment| Policy { alignment: Some(alignment), ..Policy::NONE }.words();
    for (name, text) in all {
        let one = parse(&[(name, text)]).unwrap().unwrap();
        assert_ne!(words(one), words(Alignment::default()), "{name}");
    }
    assert_ne!(Policy::NONE.words(), words(Alignment::default()));
}

#[test]
fn what_is_out_of_range_is_refused_with_the_name_and_the_numbers() {
    for (name, text, range) in [
        (HOLD, "31", "1 to 30"),
        (HOLD, "200", "1 to 30"),
        (HOLD, "0", "1 to 30"),
        (PARTIAL, "-1", "0 to 30"),
        (STALL, "1.5", "1 to 30"),
        (TARGET_FILL, "0.04", "0.05 to 1"),
        (TARGET_FILL, "1.1", "0.05 to 1"),
        (KV_HIGH, "90%", "0 to 1"),
        (KV_LOW, "NaN", "0 to 1"),
        (QUEUE, "0", "1 to 4294967295"),
    ] {
        let error = parse(&[(name, text)]).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(text) && error.contains(range), "{error}");
        assert!(parse(&[(ENABLE, "0"), (name, text)]).is_err(), "{name} is wrong, off or not");
    }
    let error = parse(&[(KV_LOW, "0.9")]).unwrap_err();
    assert_eq!(error, PolicyError::Watermarks { low: 900, high: 900 });
    assert!(error.to_string().contains(KV_LOW) && error.to_string().contains(KV_HIGH), "{error}");
}

#[test]
fn flags_of_steps_and_padding_are_parsed_strictly() {
    assert_eq!(Policy::parse_step_ms("50"), Ok(50));
    assert!(Policy::parse_step_ms("60001").unwrap_err().to_string().contains("0 to 60000"));
    for (asked, lanes, bound) in [(None, 1, None), (None, 2, Some(GROUP_STEP_MS_MAX)), (Some(7), 1, Some(7))]
    {
        assert_eq!(Policy::step_ms_max_of(asked, lanes), bound, "{asked:?} for {lanes} lanes");
    }
    assert_eq!(Policy::step_ms_max_of(Policy::parse_step_ms("0").ok(), 8), None, "0 switches it off");
    assert_eq!(Policy::parse_padding("0.25"), Ok(250));
    assert_eq!(Policy::parse_padding("0"), Ok(0));
    assert!(Policy::parse_padding("1").unwrap_err().to_string().contains("0 to 0.999"));
}
