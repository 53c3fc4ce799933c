//! Where a call comes in: which method it asks for, what it may send, who answers it.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use http::{Method as Verb, Request, Response, StatusCode, header::CONTENT_TYPE};
use hyper::{body::Incoming, service::Service};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};
use tonic_health::{pb::health_server::HealthServer, server::HealthService};
use tower::{ServiceExt, util::BoxCloneSyncService};

use super::{
    connection::Connection,
    layers::{
        AnswerBudget, Budget, Call, Framed, Handling, Limits, Measure, Outgoing, RETRY, StopRule,
        grpc_timeout,
    },
    metrics::Metrics,
    native::{AdminApi, BrokerApi, Caller, status},
};
use crate::{
    broker::Error,
    model::{Invalid, MAX_BATCH_BYTES},
    pb::v1::admin_server::AdminServer,
};

/// Largest request with messages: as many bytes of messages as allowed, and what is around them.
const SEND_BYTES: usize = MAX_BATCH_BYTES + 64 * 1024;
/// Largest request of any other kind.
const PLAIN_BYTES: usize = 1024 * 1024;

/// What HTTP/2 counts for each header beside its name and value.
const HEADER_OVERHEAD: usize = 32;

/// One method of the API.
pub(super) struct Method {
    path: &'static str,
    /// As metrics show it.
    pub(super) name: &'static str,
    target: Target,
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Send,
    SendStream,
    Pull,
    CommitOffsets,
    GetOffsets,
    QueryMessages,
    Admin,
    Health,
    HealthWatch,
    Reflection,
    ReflectionAlpha,
}

macro_rules! methods {
    ($($target:ident $name:literal,)+) => {
        /// All methods, the busy ones first.
        pub(super) const METHODS: &[Method] =
            &[$(Method { path: concat!("/", $name), name: $name, target: Target::$target }),+];
    };
}

methods! {
    Send "holdfast.v1.Broker/Send",
    Pull "holdfast.v1.Broker/Pull",
    SendStream "holdfast.v1.Broker/SendStream",
    CommitOffsets "holdfast.v1.Broker/CommitOffsets",
    GetOffsets "holdfast.v1.Broker/GetOffsets",
    QueryMessages "holdfast.v1.Broker/QueryMessages",
    Admin "holdfast.v1.Admin/CreateTopic",
    Admin "holdfast.v1.Admin/UpdateTopic",
    Admin "holdfast.v1.Admin/DeleteTopic",
    Admin "holdfast.v1.Admin/ListTopics",
    Admin "holdfast.v1.Admin/DescribeTopic",
    Admin "holdfast.v1.Admin/CreateGroup",
    Admin "holdfast.v1.Admin/UpdateGroup",
    Admin "holdfast.v1.Admin/DeleteGroup",
    Admin "holdfast.v1.Admin/ListGroups",
    Admin "holdfast.v1.Admin/DescribeGroup",
    Admin "holdfast.v1.Admin/ResetOffsets",
    Admin "holdfast.v1.Admin/GetNodeStatus",
    Health "grpc.health.v1.Health/Check",
    HealthWatch "grpc.health.v1.Health/Watch",
    Reflection "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ReflectionAlpha "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}

impl Target {
    fn limits(self) -> Limits {
        match self {
            Self::Send => Limits { message: SEND_BYTES, stream: false },
            Self::SendStream => Limits { message: SEND_BYTES, stream: true },
            Self::Reflection | Self::ReflectionAlpha => Limits { message: PLAIN_BYTES, stream: true },
            Self::Pull
            | Self::CommitOffsets
            | Self::GetOffsets
            | Self::QueryMessages
            | Self::Admin
            | Self::Health
            | Self::HealthWatch => Limits { message: PLAIN_BYTES, stream: false },
        }
    }

    /// Whether the door gives up at the deadline. A pull answers a little before by itself, and a stream
    /// belongs to its client.
    fn ends_at_deadline(self) -> bool {
        match self {
            Self::Send
            | Self::CommitOffsets
            | Self::GetOffsets
            | Self::QueryMessages
            | Self::Admin
            | Self::Health => true,
            Self::Pull | Self::SendStream | Self::HealthWatch | Self::Reflection | Self::ReflectionAlpha => {
                false
            }
        }
    }
}

type Erased = BoxCloneSyncService<Request<Framed<Incoming>>, Response<Body>, Infallible>;

/// What every call has to keep.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallLimits {
    /// Most calls at once.
    pub(super) calls: u64,
    /// Most bytes of headers, counted as HTTP/2 does.
    pub(super) headers: u64,
    /// How long a request may take to arrive.
    pub(super) request_timeout: Duration,
}

/// Everything that answers calls; one for all connections.
pub(super) struct House {
    pub(super) metrics: Arc<Metrics>,
    /// Memory of requests that are arriving.
    pub(super) requests: Budget,
    /// What sends may take of it.
    pub(super) sends: Budget,
    /// Memory of answers that have not been read.
    pub(super) answers: AnswerBudget,
    pub(super) limits: CallLimits,
    pub(super) broker: BrokerApi,
    pub(super) admin: AdminServer<AdminApi>,
    pub(super) health: HealthServer<HealthService>,
    pub(super) reflection: Erased,
    pub(super) reflection_alpha: Erased,
    pub(super) stop: CancellationToken,
}

/// The door of one connection.
#[derive(Clone)]
pub(super) struct Door {
    house: Arc<House>,
    connection: Arc<Connection>,
}

impl Door {
    pub(super) fn new(house: Arc<House>, connection: Arc<Connection>) -> Self {
        Self { house, connection }
    }

    fn open(&self, request: Request<Incoming>) -> Call {
        let path = request.uri().path();
        let Some((index, method)) = METHODS.iter().enumerate().find(|(_, method)| method.path == path) else {
            let measure = Measure::begin(&self.house.metrics, usize::MAX);
            let text = format!("there is no method {}", path.get(..200).unwrap_or(path));
            return self.refuse(Status::unimplemented(text), measure);
        };
        let measure = Measure::begin(&self.house.metrics, index);
        if !is_grpc(&request) {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Call::answered(response, measure, Arc::clone(&self.connection));
        }
        if let Err(error) = self.admit(&request) {
            return self.refuse(status::of(&error), measure);
        }
        let deadline = match grpc_timeout(request.headers()) {
            Ok(timeout) => timeout.and_then(|timeout| measure.begun().checked_add(timeout)),
            Err(status) => return self.refuse(status, measure),
        };
        let target = method.target;
        let handling = self.handle(target, request, deadline);
        let stream = match target {
            Target::SendStream => Some(StopRule::Itself),
            Target::HealthWatch | Target::Reflection | Target::ReflectionAlpha => {
                Some(StopRule::At(self.house.stop.clone()))
            }
            Target::Send
            | Target::Pull
            | Target::CommitOffsets
            | Target::GetOffsets
            | Target::QueryMessages
            | Target::Admin
            | Target::Health => None,
        };
        let deadline = deadline.filter(|_| target.ends_at_deadline());
        Call::new(handling, measure, Arc::clone(&self.connection), deadline, stream)
    }

    fn refuse(&self, status: Status, measure: Measure) -> Call {
        Call::answered(status.into_http(), measure, Arc::clone(&self.connection))
    }

    /// Whether there is room for one more call, and it is not too large by its headers alone.
    fn admit(&self, request: &Request<Incoming>) -> Result<(), Error> {
        let House { metrics, limits, answers, .. } = &*self.house;
        let calls = metrics.calls.get();
        if calls > limits.calls {
            metrics.rejections.add(1);
            let (what, key) = ("calls are running", "api.calls_max");
            return Err(Error::Busy { what, key, seen: calls, limit: limits.calls, retry: RETRY });
        }
        answers.admit(&self.connection)?;
        let headers = request.headers().iter().fold(0_u64, |sum, (name, value)| {
            let bytes = name.as_str().len().saturating_add(value.len()).saturating_add(HEADER_OVERHEAD);
            sum.saturating_add(bytes as u64)
        });
        if headers > limits.headers {
            let problem = format!(
                "have {headers} bytes, over the limit of {} (`api.headers_max`); send less metadata",
                limits.headers
            );
            return Err(Invalid::new("headers", problem).into());
        }
        Ok(())
    }

    fn handle(&self, target: Target, request: Request<Incoming>, deadline: Option<Instant>) -> Handling {
        let within = self.house.limits.request_timeout;
        let memory = match target {
            Target::Send | Target::SendStream => &self.house.sends,
            _ => &self.house.requests,
        };
        let framed = |body| Framed::new(body, target.limits(), memory, deadline, within);
        let broker = || self.house.broker.clone();
        match target {
            Target::Send => Box::pin(broker().send(framed(request.into_body()))),
            Target::SendStream => Box::pin(broker().send_stream(framed(request.into_body()))),
            Target::Pull => {
                let caller = Caller { connection: Arc::clone(&self.connection), deadline };
                Box::pin(broker().pull(framed(request.into_body()), caller))
            }
            Target::CommitOffsets => Box::pin(broker().commit_offsets(framed(request.into_body()))),
            Target::GetOffsets => Box::pin(broker().get_offsets(framed(request.into_body()))),
            Target::QueryMessages => {
                let connection = Arc::clone(&self.connection);
                Box::pin(broker().query_messages(framed(request.into_body()), connection))
            }
            Target::Admin => answer(self.house.admin.clone().oneshot(request.map(framed))),
            Target::Health | Target::HealthWatch => {
                answer(self.house.health.clone().oneshot(request.map(framed)))
            }
            Target::Reflection => answer(self.house.reflection.clone().oneshot(request.map(framed))),
            Target::ReflectionAlpha => {
                answer(self.house.reflection_alpha.clone().oneshot(request.map(framed)))
            }
        }
    }
}

/// A generated service never fails; it answers with a status.
fn answer<F>(service: F) -> Handling
where
    F: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
{
    Box::pin(async move {
        match service.await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    })
}

fn is_grpc(request: &Request<Incoming>) -> bool {
    let kind = request.headers().get(CONTENT_TYPE).map(http::HeaderValue::as_bytes);
    request.method() == Verb::POST && kind.is_some_and(|kind| kind.starts_with(b"application/grpc"))
}

impl Service<Request<Incoming>> for Door {
    type Response = Response<Outgoing>;
    type Error = Infallible;
    type Future = Call;

    fn call(&self, request: Request<Incoming>) -> Call {
        self.open(request)
    }
}
