//! `atom serve`.

use crate::access;
use crate::answer_format::FormatArg;
use crate::args::ServeArgs;
use crate::engine::HostEngine;
use crate::launch::{Running, launch};
use crate::output::say;
use anyhow::{Context, Result, anyhow, bail};
use atom_serve::{SeedSource, Server, ServerOptions, TextModel};
use atom_text::{ChatTemplate, Dialect};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Serves until told to stop; an error if a rank was lost.
pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(REACTOR_THREADS)
        .enable_all()
        .build()
        .context("starting the HTTP threads")?;
    // All of this before the model is loaded: a wrong file or a taken port should not cost a minute.
    let mut options = ServerOptions::new(String::new(), SeedSource::new(0));
    args.access.apply(&mut options)?;
    access::raise_descriptor_limit();
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime.block_on(TcpListener::bind(address)).with_context(|| {
        format!("can't listen on {address}; another program may use the port, --port takes another one")
    })?;
    // Before the model is loaded, too: a signal that nobody listens for would end the process.
    let hangups = {
        let _reactor = runtime.enter();
        let listens = args.access.has_log_file().then(|| signal(SignalKind::hangup()));
        listens.transpose().context("listening for SIGHUP")?
    };
    let Running { host, text, served_name, seed, layout, end_tokens } = launch(&args.engine)?;
    let host = Arc::new(host);
    let mut names = args.served_model_name.iter().cloned();
    options.model = names.next().unwrap_or(served_name);
    options.seeds = SeedSource::new(seed);
    options.aliases = names.collect();
    options.end_tokens = end_tokens;
    options.admin = args.enable_admin;
    options.ui = !args.no_ui;
    options.debug = args.enable_debug;
    options.drain = Duration::from_secs(args.drain_seconds);
    let model = options.model.clone();
    let dialect = dialect(args, &text.template);
    let text = TextModel::new(text.tokenizer, text.template, dialect);
    let profile_dir = args.profile_dir.clone();
    let engine = HostEngine { host: Arc::clone(&host), layout, profile_dir };
    let server = Server::new(Arc::new(engine), text, options);
    let outcome = runtime.block_on(async {
        let shown = listener.local_addr().context("the listener's address")?;
        let scheme = args.access.scheme();
        say(format_args!("serving {model} on {scheme}://{shown}/v1 (Ctrl-C to stop)\n"))?;
        if let Some(hangups) = hangups {
            tokio::spawn(reopen_log(hangups, Arc::downgrade(&server)));
        }
        let drained = atom_serve::serve(listener, server, stop(Arc::clone(&host))).await;
        if drained.cut > 0 {
            bail!("{} requests were cut short by the end of the drain", drained.cut);
        }
        Ok(())
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    let fault = host.health().fault;
    let stopped = Arc::try_unwrap(host).map_or(Ok(()), atom_rank::Host::shutdown);
    fault.map_or(stopped, Err).map_err(|fault| anyhow!("a rank was lost: {fault}"))?;
    outcome
}

/// How the model marks reasoning and calls: as told, or as its template shows.
fn dialect(args: &ServeArgs, template: &ChatTemplate) -> Dialect {
    let found = Dialect::detect(template);
    let (tools, tools_say) =
        chosen(args.tool_call_parser, found.tools, |format| (format.name(), format.is_verified()));
    let (reasoning, reasoning_says) =
        chosen(args.reasoning_parser, found.reasoning, |format| (format.name(), format.is_verified()));
    tracing::info!("tool calls: {tools_say}; reasoning: {reasoning_says}");
    Dialect { reasoning, tools }
}

/// The format, and where it comes from in words.
fn chosen<T: Copy>(
    asked: FormatArg<T>,
    found: Option<T>,
    describe: impl Fn(T) -> (&'static str, bool),
) -> (Option<T>, String) {
    let (format, from) = match asked {
        FormatArg::Auto => (found, "the chat template"),
        FormatArg::Named(format) => (Some(format), "the command line"),
        FormatArg::None => return (None, "off (the command line)".into()),
    };
    let Some(format) = format else { return (None, "none that the chat template shows".into()) };
    let (name, is_verified) = describe(format);
    let doubt = if is_verified { "" } else { "; not checked against a published template" };
    (Some(format), format!("{name} ({from}{doubt})"))
}

/// Opens the request log anew on every SIGHUP, as programs that rotate logs ask for.
async fn reopen_log(mut hangups: Signal, server: Weak<Server>) {
    while hangups.recv().await.is_some() {
        let Some(server) = server.upgrade() else { return };
        server.reopen_request_log();
    }
}

/// Resolves on SIGTERM, SIGINT, or when a rank is lost: then every request has been answered.
async fn stop(host: Arc<atom_rank::Host>) {
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return tracing::error!("can't listen for signals; stopping");
    };
    let lost = async {
        while host.health().fault.is_none() && !host.has_ended() {
            tokio::time::sleep(FAULT_LOOK_EVERY).await;
        }
    };
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM"),
        _ = interrupt.recv() => tracing::info!("interrupted; once more ends at once"),
        () = lost => tracing::error!("a rank was lost, or another host was told to stop; stopping"),
    }
    // Whoever presses Ctrl-C again does not want to wait for running requests.
    tokio::spawn(async move {
        interrupt.recv().await;
        tracing::warn!("interrupted again: running requests are cut");
        atom_cuda::quit(EXIT_INTERRUPTED);
    });
}

/// HTTP is light beside the model; two threads keep one slow parse from blocking the rest.
const REACTOR_THREADS: usize = 2;
/// How soon after a fault the process begins to stop.
const FAULT_LOOK_EVERY: Duration = Duration::from_millis(250);
/// What a shell expects of a program that an interrupt ended.
const EXIT_INTERRUPTED: u8 = 130;
