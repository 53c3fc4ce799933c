//! Compiles `proto/` without protoc, so that a fresh clone builds with cargo alone, and notes what is built from what.

use std::{env, error::Error, fs, path::PathBuf, process::Command};

use prost::Message;

const FILES: [&str; 3] = ["holdfast/v1/message.proto", "holdfast/v1/broker.proto", "holdfast/v1/admin.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let descriptors = protox::compile(FILES, ["proto"])?;
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".holdfast.v1.Message.body")
        .codec_path("crate::pb::ProtoCodec")
        .compile_fds(descriptors)?;
    note_build();
    Ok(())
}

/// Tells the code its commit and compiler. Builds for development do not know their commit: it would make every
/// commit a full build.
fn note_build() {
    println!("cargo:rerun-if-env-changed=HOLDFAST_BUILD_COMMIT");
    let commit = env::var("HOLDFAST_BUILD_COMMIT").ok().or_else(|| {
        if env::var("PROFILE").as_deref() != Ok("release") {
            return None;
        }
        let log = output("git", &["rev-parse", "--git-path", "logs/HEAD"])?;
        if fs::exists(&log).unwrap_or(false) {
            println!("cargo:rerun-if-changed={log}");
        }
        output("git", &["rev-parse", "--short=12", "HEAD"])
    });
    let rustc = env::var("RUSTC").ok().and_then(|rustc| output(&rustc, &["--version"]));
    println!("cargo:rustc-env=HOLDFAST_BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo:rustc-env=HOLDFAST_BUILD_RUSTC={}", rustc.as_deref().unwrap_or("unknown"));
}

/// What a command prints, if it works.
fn output(command: &str, arguments: &[&str]) -> Option<String> {
    let output =
        Command::new(command).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
