use super::*;
use clap::CommandFactory;

fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(normalise(args.iter().map(OsString::from)))
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn flags_of_vllm_and_atom_are_found_again() {
    let cli = parse(&["atom", "serve", "-tp", "3", "--max_num_seqs", "8", "--server_port=9000"]).unwrap();
    let Command::Serve(args) = cli.command else { panic!() };
    assert_eq!((args.engine.tensor_parallel_size, args.engine.max_num_seqs, args.port), (3, 8, 9000));
    let cli = parse(&["atom", "serve", "-dp=2", "--enable_dp_attention"]).unwrap();
    let Command::Serve(args) = cli.command else { panic!() };
    assert_eq!((args.engine.data_parallel_size, args.engine.enable_dp_attention), (2, true));
}

#[test]
fn values_and_texts_are_left_alone() {
    let cli = parse(&["atom", "generate", "--model=my_model.gguf", "--", "--a_b"]).unwrap();
    let Command::Generate(args) = cli.command else { panic!() };
    assert_eq!((args.engine.model.as_str(), args.prompt.as_deref()), ("my_model.gguf", Some("--a_b")));
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    for flag in ["--quantization=x", "--method=x"] {
        let Command::Serve(args) = parse(&["atom", "serve", flag]).unwrap().command else { panic!() };
        let refusal = args.engine.refuse_unbuilt().unwrap_err().to_string();
        assert!(refusal.contains(&flag.replace("=x", "")), "{flag}: {refusal}");
    }
    let Command::Serve(args) = parse(&["atom", "serve"]).unwrap().command else { panic!() };
    assert!(args.engine.refuse_unbuilt().is_ok());
    assert!(parse(&["atom", "serve", "--no-such-flag"]).is_err());
}

#[test]
fn sizes_are_binary() {
    assert_eq!(parse_size("4GiB"), Ok(4 << 30));
    assert_eq!(parse_size("1.5m"), Ok(3 << 19));
    assert_eq!(parse_size("77"), Ok(77));
    assert!(parse_size("4 parsecs").is_err() && parse_size("GiB").is_err());
}

#[test]
fn formats_of_answers_are_known_by_name() {
    let serve = |args: &[&str]| match parse(&[&["atom", "serve"], args].concat())?.command {
        Command::Serve(args) => Ok((args.tool_call_parser, args.reasoning_parser)),
        _ => unreachable!("it says serve"),
    };
    let named = (FormatArg::Named(ToolFormat::Hermes), FormatArg::None);
    assert_eq!(serve(&[]).unwrap(), (FormatArg::Auto, FormatArg::Auto));
    assert_eq!(serve(&["--tool_call_parser", "hermes", "--reasoning-parser=none"]).unwrap(), named);
    for (flag, known) in [("--tool-call-parser", "qwen3_coder"), ("--reasoning-parser", "think")] {
        let error: clap::Error = serve(&[flag, "Hermes 9"]).unwrap_err();
        let text = error.to_string();
        assert!([flag, "Hermes 9", "auto, none, ", known].iter().all(|word| text.contains(word)), "{text}");
    }
}
