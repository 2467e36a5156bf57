from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthRequest(_message.Message):
    __slots__ = ("service",)
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    service: str
    def __init__(self, service: _Optional[str] = ...) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("status",)
    class ServingStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[HealthResponse.ServingStatus]
        SERVING: _ClassVar[HealthResponse.ServingStatus]
        NOT_SERVING: _ClassVar[HealthResponse.ServingStatus]
        SERVICE_UNKNOWN: _ClassVar[HealthResponse.ServingStatus]
    UNKNOWN: HealthResponse.ServingStatus
    SERVING: HealthResponse.ServingStatus
    NOT_SERVING: HealthResponse.ServingStatus
    SERVICE_UNKNOWN: HealthResponse.ServingStatus
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: HealthResponse.ServingStatus
    def __init__(self, status: _Optional[_Union[HealthResponse.ServingStatus, str]] = ...) -> None: ...
